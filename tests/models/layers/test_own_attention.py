"""Attention from outside serves an engine with its own bits, the same in any batch; one that gives others is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_here import engines_here, installed

from vnext import LLM, SamplingParams
from vnext.commands.cli import main
from vnext.kernels import paged_attention as plain
from vnext.kernels.attention_backends import ATTENTION_BACKENDS
from vnext.kernels.calls import AttentionCall
from vnext.kernels.table import plain_operations
from vnext.models.hosted import own_attention as outside
from vnext.models.hosted.own_attention import AttentionError, Heads, OwnAttention, own_attention, require_same
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.cascade import Costs
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused
from vnext.runtime.protocol.settings import SettingsError
from vnext.runtime.rank.gpu_loading import with_attention
from vnext.runtime.rank.together import Own
from vnext.sampling.sampling import sampler_for

OWN = '''
import numpy as np
import torch

CALLS = []

def attention_metadata(step):
    return step

def paged_attention(query, call):
    """A query at a time, in float64: plainly another order of sums than vnext's."""
    step, given = call.metadata, []
    CALLS.append(len(query))
    for row, (first, stop) in enumerate(zip(step.query_starts[:-1].tolist(), step.query_starts[1:].tolist())):
        for at in range(first, stop):
            end = int(step.context_lengths[row]) - (stop - at) + 1
            places = torch.arange(max(0, end - call.window) if call.window else 0, end)
            pages = step.block_table[row].long()[places // step.block_size]
            keys, values = (cache[pages, :, places % step.block_size].double() for cache in (call.key_cache, call.value_cache))
            shared = query[at].double().unflatten(0, (keys.shape[1], -1))
            marks = torch.einsum("hgd,khd->hgk", shared, keys) * call.scale
            given.append(torch.einsum("hgk,khd->hgd", marks.softmax(-1), values).flatten(0, 1).to(query.dtype))
    return torch.stack(given) if given else query
'''
PROMPTS = ["def f(x):", "The", "import os\nimport sys\n\nclass A:\n    def", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
HEADS = Heads(4, 2, 32, torch.bfloat16, (0, 24))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers one that is right, and one whose third row and those behind it read the second one's blocks."""
    modules = {"own_slow": OWN, "own_short": OWN.replace("range(first, stop):\n", "range(first, stop):\n            row = min(row, 1)\n")}
    installed(tmp_path, monkeypatch, outside.GROUP, {"slow": "own_slow", "short": "own_short"}, modules)


def answers(**settings: object) -> list[list[int]]:
    asked = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    here = "tensor_parallel_size" not in settings
    settings = {"log": "off", **({"executor": "inproc"} if here else {}), **settings}
    with engines_here() if here else nullcontext(), LLM(str(DEMO_MODEL), threads=1, **settings) as llm:
        return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, asked, use_tqdm=False)]


@pytest.mark.usefixtures("package")
def test_an_engine_attends_by_it_and_its_log_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens in any batch and on two ranks; a log names it, and its steps give the same bits again."""
    calls = import_module("own_slow").CALLS
    found = answers(attention_function="slow", log="full", log_dir=str(tmp_path / "logs"))
    assert len(calls) > 14
    assert answers(attention_function="slow", max_num_batched_tokens=7, max_num_seqs=2) == found
    assert answers(attention_function="slow", tensor_parallel_size=2) == found
    (log,) = (tmp_path / "logs").iterdir()
    calls.clear()
    assert main(["replay", "exec", str(log)]) == 0 and "every token is the same" in capsys.readouterr().out
    assert len(calls) > 14, "every layer of every step"


@pytest.mark.usefixtures("package")
def test_what_an_engine_refuses() -> None:
    for name, why in {"short": "gives other results of the whole context than", "no": "'no' as an entry point of vnext.attention; there are: short, slow"}.items():
        with pytest.raises(StartRefused, match=f"^--attention-function: .*{why}"):
            LLM(str(DEMO_MODEL), threads=1, log="off", attention_function=name)
    with pytest.raises(SettingsError, match="attention is slow, which does not read keys and values in 8 bits"):
        LLM(str(DEMO_MODEL), attention_function="slow", kv_cache_dtype="int8")


def of(attend: Callable[[torch.Tensor, AttentionCall], Any]) -> OwnAttention:
    return OwnAttention("own", plain.attention_metadata, attend)


def shifted(by: Callable[[torch.Tensor, AttentionCall], float]) -> OwnAttention:
    """The reference, plus a small number that depends on the call."""
    return of(lambda query, call: plain.paged_attention(query, call) + by(query, call))


WRONG = {
    "gives other results of the whole context": of(lambda query, call: plain.paged_attention(query, call) * 1.2),
    "gives other results in a window of 24": of(lambda query, call: plain.paged_attention(query, call._replace(window=0))),
    "other bits for rows again": shifted(lambda query, call: float(torch.rand(1)) / 50),
    "other bits for rows in another order": shifted(lambda query, call: 0.02 * float(call.metadata.step.context_lengths[0] == 34)),
    "other bits for rows alone": shifted(lambda query, call: 0.02 * float(len(call.metadata.step.context_lengths) == 1)),
    "other bits for rows (begun|cut otherwise)": shifted(lambda query, call: 0.02 * float(len(call.metadata.step.context_lengths) == 2)),
    "fails with ZeroDivisionError: division by zero": of(lambda query, call: 1 / 0),
    "fails with TypeError: a int that is not of the queries' dtype and shape": of(lambda query, call: 0),
    "fails with TypeError: a Tensor that is not": of(lambda query, call: plain.paged_attention(query, call).float()),
}


@pytest.mark.parametrize("why", WRONG)
def test_one_that_gives_others_is_refused(why: str) -> None:
    with pytest.raises(AttentionError, match=f"^the attention own .*{why}"):
        require_same(WRONG[why], HEADS)


@pytest.mark.parametrize("heads", [HEADS, Heads(3, 3, 16, torch.float32, softcap=4.0), Heads(4, 1, 64, torch.bfloat16, (8,), 0.0, True)])
def test_the_reference_passes(heads: Heads) -> None:
    require_same(of(plain.paged_attention), heads)


def test_one_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, why in {"no.such": "cannot be imported .ModuleNotFoundError", "types": "lacks a function: module 'types' has no"}.items():
        points = EntryPoints([EntryPoint("own", value, outside.GROUP)])
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group, points=points: points)
        with pytest.raises(AttentionError, match=f"^the attention own {why}"):
            own_attention("own", HEADS)


def test_a_device_s_steps_attend_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are then not captured, and no prefix is read once for all rows: it may know neither."""
    usual = plain_operations()
    variants = DeviceVariants(operations=usual, choose=sampler_for("cpu"), shapes=Shapes((1, 2), (16,)), cascade=Costs(1, 1))
    own = of(lambda query, call: query)
    found = with_attention(variants, SimpleNamespace(own=Own(None, own)), ATTENTION_BACKENDS["auto"])
    assert found.operations.paged_attention is own.paged_attention and found.operations.rms_norm is usual.rms_norm
    assert (found.shapes, found.cascade) == (Shapes((), (16,)), None)
