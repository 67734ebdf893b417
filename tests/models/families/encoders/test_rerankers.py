"""Rerankers: a model reads query and document together and scores them as transformers does, the same bits alone and in company."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from encoder_cases import SCORERS, save_encoder, save_tokenizer
from engine_here import engines_here

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers import encoder
from vnext.models.loading.tail import load_tail
from vnext.models.loading.unread import unread
from vnext.runtime.client.output_stream import Refused
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.tokenizer import Tokenizer

sys.path += [str(Path(__file__).resolve().parents[3] / folder) for folder in ("server", "runtime")]

from edge_server import EdgeServer  # noqa: E402  (needs the path above)

OPTIONS: dict[str, Any] = dict(executor="inproc", threads=1, log="off")
QUERY, DOCUMENTS = "the quick fox", ["a b c", "the quick brown fox", "a", "z y x w v u t s r q p o n m l k j i h g f", "abc def"]


def saved(path: Path, name: str) -> torch.nn.Module:
    model = save_encoder(path, name, labels=1, pad_token_id=4)  # no text has it: transformers counts no such positions
    save_tokenizer(path)
    return model


def expected(path: Path, model: torch.nn.Module, query: str, document: str) -> float:
    """The sigmoid of transformers' logit, which sentence-transformers takes of a head of one label."""
    pair = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(query, document)
    types = {"token_type_ids": torch.tensor([pair.type_ids])} if getattr(model.config, "type_vocab_size", 1) > 1 else {}
    with torch.inference_mode():
        return float(model(torch.tensor([pair.ids]), **types).logits[0, 0].sigmoid())


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_transformers_and_have_their_bits_in_company(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    assert not unread(tmp_path)
    with engines_here(), LLM(str(tmp_path), max_num_seqs=4, **OPTIONS) as llm:
        assert llm.ready.environment["pooling"] == "cls" and llm.ready.environment["scores"] == "pairs"
        together = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS * 3) if each.outputs]
        assert together == [llm.score([QUERY], [each])[0].outputs.score for each in DOCUMENTS] * 3  # type: ignore[union-attr]
        assert together[:5] == pytest.approx([expected(tmp_path, model, QUERY, each) for each in DOCUMENTS], abs=1e-5)
        assert len({round(each, 4) for each in together}) == 5, "the scores say nothing"
        with pytest.raises(Refused, match="writes nothing"):
            llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"use score\(\)"):
            llm.embed("a")
        with pytest.raises(InvalidRequest, match=r"holds \[SEP\], which ends it"):
            llm.score("a [SEP] b", "c")
        with pytest.raises(InvalidRequest, match="give texts, not token ids"):
            llm.score([[5, 6]], ["c"])
        with pytest.raises(InvalidRequest, match="2 queries and 3 documents"):
            llm.score(["a", "b"], ["a", "b", "c"])


def test_a_server_ranks_by_them(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert")
    with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
        engine = SimpleNamespace(address=llm._engine.addresses[0], close=lambda: None)
        with EdgeServer(Tokenizer.load(tmp_path), engine) as server:
            right = {each: expected(tmp_path, model, QUERY, each) for each in DOCUMENTS}
            _, ranked, _ = server.post("/rerank", {"query": QUERY, "documents": DOCUMENTS})
            assert [each["document"]["text"] for each in ranked["results"]] == sorted(DOCUMENTS, key=lambda text: -right[text])
            _, scored, _ = server.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
            assert [each["score"] for each in scored["data"]] == pytest.approx([*right.values()], abs=1e-5)
            _, paired, _ = server.post("/score", {"text_1": [QUERY] * 5, "text_2": DOCUMENTS})
            assert paired["data"] == scored["data"] and paired["usage"] == scored["usage"]
            _, cut, _ = server.post("/score", {"text_1": QUERY, "text_2": "a " * 5000, "truncate_prompt_tokens": 30})
            _, whole, _ = server.post("/score", {"text_1": QUERY, "text_2": "a " * 22})
            assert cut["data"] == whole["data"] and cut["usage"]["total_tokens"] == 30
            for path, body, words in (
                ("/v1/embeddings", {"input": "a"}, "scores pairs of texts and makes no vectors"),
                ("/rerank", {"query": QUERY, "documents": ["a"], "pooling": "mean"}, "leave pooling out"),
                ("/score", {"text_1": "a", "text_2": "b " * 400}, "maximum context length is 330 tokens"),
                ("/score", {"text_1": "a", "text_2": []}, "text_2 is an empty list"),
            ):
                status, refused, _ = server.post(path, body)
                assert status == 400 and words in refused["error"]["message"], refused


def test_types_begin_behind_the_first_separator_of_each_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fault: one text's separators count for the next one."""
    model = saved(tmp_path, "bert")

    def scores() -> list[float]:
        with engines_here(), LLM(str(tmp_path), **OPTIONS) as llm:
            return [each.outputs.score for each in llm.score(QUERY, DOCUMENTS) if each.outputs]

    right = pytest.approx([expected(tmp_path, model, QUERY, each) for each in DOCUMENTS], abs=1e-5)
    assert scores() == right

    def forgetful(batch: Any, described: Any) -> torch.Tensor:
        ends = (batch.token_ids == described.separator).long()
        return (ends.cumsum(0) - ends).clamp(max=1)

    monkeypatch.setattr(encoder, "types_of", forgetful)
    assert scores() != right


def test_what_the_files_say_of_the_score(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    raw = json.loads((tmp_path / "config.json").read_text())
    identity = "torch.nn.modules.linear.Identity"
    for said in ({"sbert_ce_default_activation_function": identity}, {"sentence_transformers": {"activation_fn": identity}}):
        (tmp_path / "config.json").write_text(json.dumps(raw | said))
        pooling = load_config(tmp_path).pooling
        assert pooling is not None and [each.activation for each in pooling.layers] == ["tanh", ""]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sbert_ce_default_activation_function": "torch.nn.Softsign"}))
    with pytest.raises(ModelError, match="Softsign behind a text's vector is not supported"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="names no sep_token"):
        load_config(tmp_path)


def test_only_heads_of_one_label_are_served(tmp_path: Path) -> None:
    save_encoder(tmp_path, "roberta", labels=2)
    with pytest.raises(ModelError, match="has 2 labels: only heads of one label"):
        load_tail(tmp_path, load_config(tmp_path))
