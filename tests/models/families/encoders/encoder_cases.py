"""Small random encoders, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 97
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=120,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=330,
    initializer_range=0.15,
)


class Case(NamedTuple):
    """A model class, and what its configuration has beside BASE."""

    architecture: str
    config: str
    changes: dict[str, Any]


IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 2) | dict.fromkeys(("eos_token_id", "sep_token_id"), 3)
CASES = {
    "bert": Case("BertModel", "BertConfig", {}),
    "bert_tanh": Case("BertModel", "BertConfig", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": Case("RobertaModel", "RobertaConfig", {"layer_norm_eps": 1e-5, "type_vocab_size": 1}),
    "xlm_roberta": Case("XLMRobertaModel", "XLMRobertaConfig", {"type_vocab_size": 1}),
    "camembert": Case("CamembertModel", "CamembertConfig", {"pad_token_id": 3}),
    "modernbert": Case("ModernBertModel", "ModernBertConfig", {"local_attention": 24, **IDS}),
    "modernbert_biased": Case(
        "ModernBertModel",
        "ModernBertConfig",
        {"local_attention": 7, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2, **IDS},
    ),
    "embedding_gemma": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {"use_bidirectional_attention": True, "sliding_window": 24, "head_dim": 16, "num_key_value_heads": 2, "query_pre_attn_scalar": 16},
    ),
    "nomic_bert": Case("NomicBertModel", "NomicBertConfig", {"head_dim": 16}),
}


SCORERS = {name: CASES[name].architecture.removesuffix("Model") for name in CASES if name not in ("nomic_bert", "embedding_gemma")}
"""Cases whose model may have a head that scores pairs, and what its class begins with."""


def save_encoder(path: Path, name: str, labels: int = 0, **changes: Any) -> torch.nn.Module:
    """Save a random model of this case, with a head of `labels` labels if there are any; return it as transformers computes it."""
    case = CASES[name]
    torch.manual_seed(1)
    config = getattr(transformers, case.config)(**BASE | case.changes | changes, **({"num_labels": labels} if labels else {}))
    architecture = f"{SCORERS[name]}ForSequenceClassification" if labels else case.architecture
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros in a new model
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.save_pretrained(path)
    return model


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghij")]


def save_tokenizer(path: Path) -> None:
    """Save a WordPiece tokenizer of letters, which frames texts and pairs as BERT's does."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "cls_token": "[CLS]"}))


def save_modules(path: Path, pooling: dict[str, object], *kinds: str) -> None:
    """Save what sentence-transformers writes beside a model: its modules and how it pools."""
    modules = [{"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"of.{kind}"} for at, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
