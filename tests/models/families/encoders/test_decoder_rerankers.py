"""Decoders that score pairs, as Qwen3-Reranker does by the logits of two tokens or by a head, and Dense layers behind a vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import save_encoder, save_modules, save_tokenizer
from engine_here import engines_here
from safetensors.torch import load_file, save_file

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.config.pooling import pooling_in
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import fingerprint, weights_digest
from vnext.models.loading.tail import Tail, load_tail
from vnext.models.loading.unread import unread
from vnext.runtime.client.output_stream import Refused
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = dict(executor="inproc", threads=1, log="off", max_num_batched_tokens=16, max_model_len=64)
QUERY, DOCUMENTS = "a b c", ["a b c", "d e f a b", "a", "z y x w v u t s r q p o n m l k j i h g f", "b b b"]
TEMPLATE = (
    "{% for each in messages if each.role == 'query' %}q {{ each.content }}{% endfor %} "
    "{% for each in messages if each.role == 'document' %}d {{ each.content }}{% endfor %} x y"
)
YES, NO = 30, 9


def save_decoder(path: Path, use: str, tied: bool, **changes: Any) -> Any:
    """A random Qwen 3 with its letters' tokenizer; returns it as transformers computes it."""
    torch.manual_seed(2)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=120, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=tied, pad_token_id=4, **changes,
    )  # fmt: skip
    model = getattr(transformers, f"Qwen3{use}")(config).eval()
    model.save_pretrained(path)
    save_tokenizer(path)
    return model


def save_logit_score(path: Path, **settings: Any) -> None:
    save_modules(path, {}, "Transformer", "LogitScore")
    (path / "sentence_bert_config.json").unlink()
    (path / "1_LogitScore").mkdir(exist_ok=True)
    (path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO} | settings))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def scores(llm: LLM, documents: list[str]) -> list[float]:
    return [each.outputs.score for each in llm.score(QUERY, documents) if each.outputs]


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_reads_the_last_token(tmp_path: Path, tied: bool) -> None:
    model = save_decoder(tmp_path, "ForSequenceClassification", tied, num_labels=1)
    assert not unread(tmp_path)
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
        found, tokenizer = scores(llm, DOCUMENTS * 2), Tokenizer.load(tmp_path)
        assert found == [scores(llm, [each])[0] for each in DOCUMENTS] * 2
        right = [logits(model, tokenizer.encode_pair(QUERY, each))[0].sigmoid().item() for each in DOCUMENTS]
        assert found[:5] == pytest.approx(right, abs=1e-5) and np.ptp(right) > 0.01
        with pytest.raises(NotDone, match="the layers behind a text's vector cannot be updated so far"):
            llm.update_weights(tmp_path)
        with pytest.raises(Refused, match="writes nothing"):
            llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("tied", [True, False])
def test_two_tokens_logits_score_what_the_template_writes(tmp_path: Path, tied: bool) -> None:
    """Such a model also writes."""
    model = save_decoder(tmp_path, "ForCausalLM", tied)
    save_logit_score(tmp_path)
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.ready.environment["scores"] == "written pairs"
        found, tokenizer = scores(llm, DOCUMENTS * 2), Tokenizer.load(tmp_path)
        assert found == [scores(llm, [each])[0] for each in DOCUMENTS] * 2
        prompts = [tokenizer.encode(f"q {QUERY} d {each} x y", False) for each in DOCUMENTS]
        last = [logits(model, each)[-1] for each in prompts]
        right = [(each[YES] - each[NO]).sigmoid().item() for each in last]
        assert found[:5] == pytest.approx(right, abs=1e-5) and np.ptp(right) > 0.01
        [answer] = llm.generate([prompts[0]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        assert answer.outputs[0].token_ids == [int(last[0].argmax())]
        (tmp_path / "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.modules.linear.Identity"}')
        save_logit_score(tmp_path, false_token_id=None)
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
        assert scores(llm, DOCUMENTS) == pytest.approx([each[YES].item() for each in last], abs=1e-4)


def test_a_pair_needs_a_template_where_it_is_written(tmp_path: Path) -> None:
    save_decoder(tmp_path, "ForCausalLM", True)
    save_logit_score(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm, pytest.raises(InvalidRequest, match="no chat template"):
        llm.score("a", "b")
    save_logit_score(tmp_path, true_token_id=97)
    with pytest.raises(ModelError, match="has no token 97, by which modules.json scores"):
        load_tail(tmp_path, load_config(tmp_path))


JUDGE = (
    '{% for each in messages if each.role == "query" %}q {{ each.content }}{% endfor %} '
    '{% for each in messages if each.role == "document" %}d {{ each.content }}{% endfor %} '
    '{# the answer can only be "yes" or "no" #}x y'
)
"""As Qwen3-Reranker's, which has the words in the text."""


def save_judge(path: Path, template: str, *words: str) -> None:
    """Save a chat template alone, and a tokenizer that knows these words."""
    raw = json.loads((path / "tokenizer.json").read_text())
    known = raw["model"]["vocab"]
    raw["model"]["vocab"] = known | {word: len(known) + at for at, word in enumerate(words)}
    (path / "tokenizer.json").write_text(json.dumps(raw))
    (path / "chat_template.jinja").write_text(template)


def test_a_chat_template_that_asks_yes_or_no_scores_without_modules(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "ForCausalLM", True)
    save_judge(tmp_path, JUDGE)
    with pytest.raises(ModelError, match="lacks yes or no, between which its chat template"):
        load_config(tmp_path)
    save_judge(tmp_path, JUDGE, "yes", "no")
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
        found, tokenizer = scores(llm, DOCUMENTS), Tokenizer.load(tmp_path)
        yes, no = tokenizer.encode("yes no", False)
        last = [logits(model, tokenizer.encode(f"q {QUERY} d {each} x y", False))[-1] for each in DOCUMENTS]
        assert found == pytest.approx([(each[yes] - each[no]).sigmoid().item() for each in last], abs=1e-5) and np.ptp(found) > 0.01


def test_a_folder_named_a_reranker_must_say_how_it_scores(tmp_path: Path) -> None:
    for folder in (tmp_path / "Qwen3-Reranker-0.6B", tmp_path / "models--x--Tiny-ReRanker" / "snapshots" / "abc"):
        folder.mkdir(parents=True)
        save_decoder(folder, "ForCausalLM", True)
        with pytest.raises(ModelError, match="is a reranker by its name and says nowhere how it scores a pair: download"):
            load_config(folder)
        save_logit_score(folder)
        assert load_config(folder).pooling


@pytest.mark.parametrize("use", ["ForSequenceClassification", "ForCausalLM"])
def test_two_ranks_score_as_one(tmp_path: Path, use: str) -> None:
    """Bit for bit, scores and the vectors of a model with layers behind its pooling."""
    save_decoder(tmp_path, use, False, **({"num_labels": 1} if use == "ForSequenceClassification" else {}))
    if use == "ForCausalLM":
        save_logit_score(tmp_path)
    found = []
    for ranks in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=ranks, threads=1, log="off", max_model_len=64) as llm:
            found.append(scores(llm, DOCUMENTS))
    assert found[0] == found[1] and np.ptp(found[0]) > 0.01


# ---- Dense --------------------------------------------------------------------------------------------------------


def save_dense(path: Path, name: str, size: tuple[int, int], **settings: Any) -> torch.nn.Linear:
    layer = torch.nn.Linear(*size, bias=settings.get("bias", True))
    (path / name).mkdir()
    (path / name / "config.json").write_text(json.dumps({"in_features": size[0], "out_features": size[1]} | settings))
    save_file({f"linear.{key}": value.data for key, value in layer.named_parameters()}, path / name / "model.safetensors")
    return layer


def test_dense_layers_stand_behind_the_pooling(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert")
    save_tokenizer(tmp_path)
    save_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    first = save_dense(tmp_path, "2_Dense", (64, 96), activation_function="torch.nn.modules.activation.Tanh")
    second = save_dense(tmp_path, "3_Dense", (96, 24), activation_function="torch.nn.modules.linear.Identity", bias=False)
    assert not unread(tmp_path)
    with engines_here(), LLM(str(tmp_path), executor="inproc", threads=1, log="off") as llm:
        texts = [QUERY, *DOCUMENTS]
        found = [each.outputs.embedding for each in llm.embed(texts)]
        assert found == [llm.embed(text)[0].outputs.embedding for text in texts]
        for text, vector in zip(texts, found):
            with torch.inference_mode():
                pooled = model(torch.tensor([Tokenizer.load(tmp_path).encode(text)])).last_hidden_state[0].mean(0)
                right = second(first(pooled).tanh())
            assert vector == pytest.approx((right / right.norm()).tolist(), abs=1e-5)
    digests = [fingerprint(tmp_path)]
    changed = {name: tensor + 1 for name, tensor in load_file(tmp_path / "3_Dense" / "model.safetensors").items()}
    save_file(changed, tmp_path / "3_Dense" / "model.safetensors")
    digests += [fingerprint(tmp_path), weights_digest(tmp_path)]
    (tmp_path / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.activation.ReLU"}')
    digests += [fingerprint(tmp_path), weights_digest(tmp_path)]
    assert len({*digests}) == 5, "another tail is another model"
    (tmp_path / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="model.safetensors is missing, which modules.json asks for"):
        load_tail(tmp_path, load_config(tmp_path))


def test_dense_layers_that_are_not_served(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    pooling = {"pooling_mode_mean_tokens": True}
    save_modules(tmp_path, pooling, "Transformer", "Pooling", "Normalize", "Dense")
    save_dense(tmp_path, "3_Dense", (96, 24))
    with pytest.raises(ModelError, match="has the modules Transformer, Pooling, Normalize, Dense, and only"):
        pooling_in(tmp_path, {})
    save_modules(tmp_path, pooling, "Transformer", "Pooling", "Dense")
    save_dense(tmp_path, "2_Dense", (96, 24), activation_function="torch.nn.modules.activation.GELU")
    with pytest.raises(ModelError, match=r"has the shape \[24, 96\] and must be a matrix over 64 numbers"):
        load_tail(tmp_path, load_config(tmp_path))


def test_a_tail_has_torchs_activations() -> None:
    from vnext.models.loading.tail import activated

    x = torch.linspace(-5, 5, 41, dtype=torch.float64)
    right = {"": x, "tanh": x.tanh(), "sigmoid": x.sigmoid(), "relu": x.relu(), "gelu": torch.nn.functional.gelu(x)}
    assert all(activated(x.numpy(), name) == pytest.approx(each.numpy(), abs=1e-14) for name, each in right.items())
    assert Tail(())(np.ones(3, np.float32)).tolist() == [1, 1, 1]
