"""The tail of a model: layers over the vector of a text, which make its embedding or the score of a pair of texts.

Owns how files describe them: the heads of ForSequenceClassification, and Dense and LogitScore of sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import msgspec

from vnext.base.tokenizer_files import vocabulary_numbers, written_template
from vnext.models.config.json_keys import Json, number, positive, read_optional_json, refuse
from vnext.models.errors import ModelError

SETTINGS, WEIGHTS = "config.json", "model.safetensors"
SNAPSHOTS = "snapshots"
"""The folder of the hub's cache between a model's and its versions'."""
CROSS_SETTINGS = "config_sentence_transformers.json"
CLASSIFIER = "ForSequenceClassification"
ACTIVATIONS = MappingProxyType({"Tanh": "tanh", "Identity": "", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu"})
"""The classes of torch, and what they are called here."""
VERDICTS = ("yes", "no")
"""The tokens by which a model judges whose chat template asks for one of them."""


class TailLayer(msgspec.Struct, frozen=True, kw_only=True):
    """activation(weight @ x + bias). `weight` [out, in] and `bias` [out] are tensors in the folder `folder` of the checkpoint, ""
    for its own; no bias is "". `rows`: the layer is row a of the weight, or row a less row b. `norm`: weight and bias, "" for none,
    of a layer norm behind the activation, with `eps`; () for none."""

    weight: str
    bias: str = ""
    activation: str = ""
    folder: str = ""
    rows: tuple[int, ...] = ()
    norm: tuple[str, ...] = ()
    eps: float = 0.0

    @property
    def tensors(self) -> list[str]:
        return [name for name in (self.weight, self.bias, *self.norm) if name]


class Scorer(msgspec.Struct, frozen=True, kw_only=True):
    """How a model scores two texts that it reads together: over the states that `kind` names, by `layers`. `is_written`: the chat
    template joins the two, else the tokenizer does."""

    kind: str
    layers: tuple[TailLayer, ...]
    is_written: bool = False


def _labels(*names: str) -> tuple[TailLayer, ...]:
    """Layers with biases, between which there is a tanh."""
    *before, last = (TailLayer(weight=f"{name}.weight", bias=f"{name}.bias") for name in names)
    return (*(msgspec.structs.replace(each, activation="tanh") for each in before), last)


HEADS = MappingProxyType(
    {"Bert": _labels("bert.pooler.dense", "classifier")}
    | dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), _labels("classifier.dense", "classifier.out_proj"))
)
"""The layers behind the first token's state, by what stands before ForSequenceClassification. Decoders have one, `score`, behind
the last token's."""


def classifier_in(raw: Json) -> Scorer | None:
    """The head that a config.json says stands on the model; None for none. Raises ModelError."""
    name = str((raw.get("architectures") or [""])[0])
    if not name.endswith(CLASSIFIER):
        return None
    base = name.removesuffix(CLASSIFIER)
    if base == "ModernBert":
        kind, layers = str(raw.get("classifier_pooling", "cls")), _modern(raw)
    else:
        found = HEADS.get(base)
        kind, layers = ("cls", found) if found else ("last", (TailLayer(weight="score.weight"),))
    return Scorer(kind=kind, layers=ended(layers, _asked(raw)))


def _modern(raw: Json) -> tuple[TailLayer, ...]:
    """ModernBERT's layers, between which there is a norm. Raises ModelError."""
    refuse(raw, "classifier_activation", unless=("gelu",))
    dense = TailLayer(
        weight="head.dense.weight",
        bias="head.dense.bias" if raw.get("classifier_bias") else "",
        activation="gelu",
        norm=("head.norm.weight", "head.norm.bias" if raw.get("norm_bias") else ""),
        eps=number(raw, "norm_eps", 1e-5),
    )
    return (dense, *_labels("classifier"))


def logit_score_in(path: Path, folder: Path, raw: Json) -> Scorer:
    """The score that the module LogitScore in `folder` makes of the head's logits. Raises ModelError."""
    settings = read_optional_json(folder / SETTINGS)
    rows = tuple(positive(settings, key) for key in ("true_token_id", "false_token_id") if settings.get(key) is not None)
    if settings.get("true_token_id") is None:
        raise ModelError(f"{folder / SETTINGS} names no true_token_id; download the model again")
    return _by_rows(path, rows, raw)


def judge_in(path: Path, raw: Json) -> Scorer | None:
    """That of a folder without modules.json whose chat template writes a query and a document and asks whether they fit, as
    Qwen3-Reranker's does: yes against no. None for another model. Raises ModelError for a reranker by its name that says nowhere
    how it scores."""
    source = written_template(path).replace("\\", "").replace("'", '"')
    if all(word in source for word in ('"query"', '"document"', '"yes" or "no"')):
        numbers = vocabulary_numbers(path, VERDICTS)
        if None in numbers:
            raise ModelError(f"the tokenizer in {path} lacks {' or '.join(VERDICTS)}, between which its chat template lets choose")
        return _by_rows(path, tuple(number for number in numbers if number is not None), raw)
    named = path.absolute().parent.parent.name if path.absolute().parent.name == SNAPSHOTS else path.absolute().name
    if "rerank" in named.lower():
        raise ModelError(
            f"{named} is a reranker by its name and says nowhere how it scores a pair: download all of its files, modules.json and "
            "chat_template.jinja too, or give its folder another name to serve it as a model that writes"
        )
    return None


def _by_rows(path: Path, rows: tuple[int, ...], raw: Json) -> Scorer:
    """The logit of the first token, less that of the second."""
    head = "model.embed_tokens.weight" if raw.get("tie_word_embeddings") else "lm_head.weight"
    asked = read_optional_json(path / CROSS_SETTINGS).get("activation_fn")
    return Scorer(kind="last", layers=ended((TailLayer(weight=head, rows=rows),), asked), is_written=True)


def dense_in(path: Path, folder: Path) -> TailLayer:
    """The layer that the module Dense in `folder` is. Raises ModelError."""
    settings = read_optional_json(folder / SETTINGS)
    return TailLayer(
        weight="linear.weight",
        bias="linear.bias" if settings.get("bias", True) else "",
        activation=activation_named(settings.get("activation_function", "Tanh")),
        folder=folder.relative_to(path).as_posix(),
    )


def ended(layers: tuple[TailLayer, ...], asked: object) -> tuple[TailLayer, ...]:
    """The layers with what a file asks for behind the last one, a sigmoid where it says nothing."""
    return (*layers[:-1], msgspec.structs.replace(layers[-1], activation=activation_named(asked or "Sigmoid")))


def activation_named(name: object) -> str:
    """Ours for a class of torch.nn. Raises ModelError."""
    found = ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        raise ModelError(f"the activation {name} behind a text's vector is not supported; supported are {', '.join(ACTIVATIONS)}")
    return found


def _asked(raw: Json) -> object:
    """The activation behind a classifier, by either key that sentence-transformers has written."""
    newer = raw.get("sentence_transformers")
    return (newer.get("activation_fn") if isinstance(newer, dict) else None) or raw.get("sbert_ce_default_activation_function")
