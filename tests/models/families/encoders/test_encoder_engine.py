"""Encoders in the engine: the vectors of sentence-transformers by the files that it writes, the same bits alone and in company."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoder_cases import save_encoder, save_modules, save_tokenizer
from engine_here import engines_here

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.config.pooling import Pooling, pooling_in
from vnext.models.errors import ModelError
from vnext.runtime.client.output_stream import Refused
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import SettingsError
from vnext.runtime.rank.together import require_model
from vnext.text.tokenizer import Tokenizer

sys.path += [str(Path(__file__).resolve().parents[3] / folder) for folder in ("server", "runtime")]

from edge_server import EdgeServer  # noqa: E402  (needs the path above)

TEXTS = ["a b c", "the quick brown fox", "a", "z y x w v u t s r q p o n m l k j i h g f e d c b a", "abc def"]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda states: states.mean(0), "cls": lambda states: states[0], "max": lambda states: states.amax(0),
    "last": lambda states: states[-1],
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("engine") / "bert"
    model = save_encoder(path, "bert")
    save_tokenizer(path)
    return path, model


def expected(oracle: tuple[Path, torch.nn.Module], text: str, kind: str = "mean") -> np.ndarray:
    tokens = Tokenizer.load(oracle[0]).encode(text)
    with torch.inference_mode():
        return POOLED[kind](oracle[1](torch.tensor([tokens])).last_hidden_state[0]).numpy()


def vectors(llm: LLM, texts: list[str], **asked: object) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(texts, **asked)])


def test_vectors_are_sentence_transformers_and_have_their_bits_in_company(oracle: tuple[Path, torch.nn.Module]) -> None:
    """The engine was asked for steps of 16 tokens, and prompts may have 330, which is what it then takes at once."""
    path, _ = oracle
    options = {"executor": "inproc", "threads": 1, "log": "off"}
    with engines_here(), LLM(str(path), max_num_batched_tokens=16, max_num_seqs=4, **options) as llm:
        assert llm.ready.config.max_num_batched_tokens == 331 and llm.ready.environment["pooling"] == "mean normalized"
        together = vectors(llm, TEXTS * 3)
        assert np.array_equal(together, np.concatenate([vectors(llm, [text]) for text in TEXTS] * 3))
        for text, found in zip(TEXTS, together):
            right = expected(oracle, text)
            assert found == pytest.approx(right / np.linalg.norm(right), abs=1e-5)
        for kind in POOLED:
            assert vectors(llm, TEXTS[1:2], pooling=kind, normalize=False)[0] == pytest.approx(expected(oracle, TEXTS[1], kind), abs=3e-5)
        assert len(llm.embed("a " * 328)[0].prompt_token_ids) == 330
        with pytest.raises(InvalidRequest, match="maximum context length is 330 tokens"):
            llm.embed("a " * 329)
        assert [each.prompt_token_ids for each in llm.embed(["a b c", [5, 6, 7, 8]], truncate_prompt_tokens=3)] == [[2, 5, 3], [5, 6, 7]]
        with pytest.raises(Refused, match="makes embeddings and scores of them, and writes nothing"):
            llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("name", ["embedding_gemma", "modernbert", "nomic_bert"])
def test_other_encoders_in_the_engine(tmp_path: Path, name: str) -> None:
    oracle = tmp_path, save_encoder(tmp_path, name)
    save_tokenizer(tmp_path)
    with engines_here(), LLM(str(tmp_path), executor="inproc", threads=1, log="off") as llm:
        together = vectors(llm, TEXTS * 2, normalize=False)
        assert np.array_equal(together, np.concatenate([vectors(llm, [text], normalize=False) for text in TEXTS] * 2))
        for text, found in zip(TEXTS, together):
            assert found == pytest.approx(expected(oracle, text), abs=3e-5)
        with pytest.raises(Refused, match="writes nothing"):
            llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_server_takes_what_the_files_say(oracle: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """The first token's state, as long as it is, and at most 40 tokens; texts are compared by the cosine."""
    path, _ = oracle
    for file in path.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    save_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "Transformer", "Pooling")
    with engines_here(), LLM(str(tmp_path), executor="inproc", threads=1, log="off") as llm:
        engine = SimpleNamespace(address=llm._engine.addresses[0], close=lambda: None)
        with EdgeServer(Tokenizer.load(tmp_path), engine) as server:
            _, answer, _ = server.post("/v1/embeddings", {"input": TEXTS})
            for text, entry in zip(TEXTS, answer["data"]):
                assert entry["embedding"] == pytest.approx(expected(oracle, text, "cls"), abs=3e-5)
            status, refused, _ = server.post("/v1/embeddings", {"input": "a " * 39})
            assert status == 400 and "maximum context length is 40 tokens" in refused["error"]["message"]
            cut = {"encoding_format": "base64", "dimensions": 8}
            _, whole, _ = server.post("/v1/embeddings", cut | {"input": ["a " * 38, "a b"]})
            for count, given in ((-1, ["a " * 5000, "a b"]), (4, ["a b c d", "a b"]), (4, [[2, 5, 6, 3, 8], [2, 5, 6, 3]])):
                status, found, _ = server.post("/v1/embeddings", cut | {"input": given, "truncate_prompt_tokens": count})
                assert found["data"][1] == whole["data"][1] and found["usage"]["total_tokens"] == (44 if count < 0 else 8)
                assert found["data"][0]["embedding"] == whole["data"][count > 0]["embedding"]
            status, refused, _ = server.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 41})
            assert status == 400 and refused["error"]["param"] == "truncate_prompt_tokens"
            _, ranked, _ = server.post("/rerank", {"query": "a b", "documents": TEXTS})
            one, *others = [expected(oracle, text, "cls") for text in ("a b", *TEXTS)]
            for each in ranked["results"]:
                other = others[each["index"]]
                cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
                assert each["relevance_score"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize(
    ("pooling", "kinds", "found"),
    [
        (MEAN, ("Transformer", "Pooling", "Normalize"), Pooling(kind="mean", normalize=True, length_max=40)),
        ({"pooling_mode_lasttoken": True}, ("Transformer", "Pooling"), Pooling(kind="last", normalize=False, length_max=40)),
        ({"pooling_mode": "max"}, ("Transformer", "Pooling"), Pooling(kind="max", normalize=False, length_max=40)),
    ],
)
def test_files_of_sentence_transformers(tmp_path: Path, pooling: dict[str, object], kinds: tuple[str, ...], found: Pooling) -> None:
    save_modules(tmp_path, pooling, *kinds)
    assert pooling_in(tmp_path, {}) == found


def test_what_files_ask_for_that_is_not_served(tmp_path: Path) -> None:
    assert pooling_in(tmp_path, {}) is None
    wrong: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
        "names CNN, which is not supported": (MEAN, ("Transformer", "CNN", "Pooling")),
        "names no Pooling": (MEAN, ("Transformer",)),
        r"pooling of \['mean_tokens', 'cls_token'\]": (MEAN | {"pooling_mode_cls_token": True}, ("Transformer", "Pooling")),
        "pooling of weightedmean": ({"pooling_mode": "weightedmean"}, ("Transformer", "Pooling")),
    }
    for sentence, (pooling, kinds) in wrong.items():
        save_modules(tmp_path, pooling, *kinds)
        if "CNN" in kinds:
            (tmp_path / "2_Pooling").mkdir(exist_ok=True)
        with pytest.raises(ModelError, match=sentence):
            pooling_in(tmp_path, {})


def test_only_encoders_are_cut_to_the_files_length(oracle: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    assert load_config(oracle[0]).position_count_max == 331
    (tmp_path / "config.json").write_text((oracle[0] / "config.json").read_text())
    save_modules(tmp_path, MEAN, "Transformer", "Pooling")
    assert load_config(tmp_path).position_count_max == 41


def test_options_that_do_not_serve_encoders_so_far(oracle: tuple[Path, torch.nn.Module]) -> None:
    config = load_config(oracle[0])
    for option, size, device in (("--pipeline-parallel-size", 2, "cpu"), ("--device cuda", 1, "cuda")):
        with pytest.raises(SettingsError, match=f"{option} does not serve encoders so far"):
            require_model(SimpleNamespace(pipeline_parallel_size=size, draft_method="", kv_disk_dir="", role="both"), config, device)
