"""The table of sampling parameters and everything that follows from it agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from vnext.base.compiled import StaleModule
from vnext.commands.chat.conversation import SETTABLE
from vnext.kernels.cpu import native
from vnext.kernels.cpu.sampling import require_columns
from vnext.runtime.batch.fed import NAMES
from vnext.runtime.gpu.sampling_updates import FLOATS, LONGS
from vnext.runtime.protocol.sampling_params import (
    IN_CHECKPOINT,
    InvalidRequest,
    SamplingDefaults,
    SamplingParams,
    to_sampling,
    validate,
)
from vnext.sampling.inputs import Penalties, SamplingInputs
from vnext.server.call import sampling_params
from vnext.server.context.openai_types import ChatBody, CompletionBody, GenerationBody
from vnext.state.params import (
    CHOOSING,
    DEFAULTS,
    FILTERS,
    FIRST_LOGGED_COUNT,
    LATER_TYPES,
    PARAMETERS,
    PENALTIES,
    ROW_DTYPES,
    Drawn,
    Guidance,
    Sampling,
)

ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("name", PARAMETERS)


@EVERY
def test_events_hold_each_with_its_type_and_default(name: str) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(Sampling)}
    assert fields[name].default == DEFAULTS[name]
    assert get_type_hints(Sampling)[name] is get_type_hints(Drawn)[name]


def test_logs_keep_their_order() -> None:
    """A new parameter stands at the end: the first logs have the fields before it."""
    assert Sampling.__struct_fields__[:FIRST_LOGGED_COUNT] == (
        "seed", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "logprobs", "min_tokens", "stop_token_ids", "ignore_eos",
    )  # fmt: skip
    later = (
        "top_n_sigma", "constraint", "prompt_logprobs", "pooling", "adapter", "num_speculative_tokens", "retention", "guidance",
    )  # fmt: skip
    assert Sampling.__struct_fields__[FIRST_LOGGED_COUNT:] == later
    assert LATER_TYPES == (float, type(None), int, int, str, int, tuple, type(None)), "vnext/log/_log.c and skimming.py read these"
    old = msgspec.to_builtins(Sampling(seed=1, max_tokens=2, top_k=3))[:FIRST_LOGGED_COUNT]
    assert msgspec.convert(old, Sampling) == Sampling(seed=1, max_tokens=2, top_k=3)
    assert msgspec.convert([2.0, b"four"], Guidance) == Guidance(scale=2.0, beside=b"four", is_prompt=False)


@EVERY
def test_requests_bodies_and_the_talk_take_each(name: str) -> None:
    usual = PARAMETERS[name].tried
    assert name in SamplingParams.__struct_fields__ and name in SETTABLE
    for kind, more in ((CompletionBody, {"prompt": ""}), (ChatBody, {"messages": []})):
        body = msgspec.convert({name: usual, **more}, kind)
        assert getattr(sampling_params(body), name) == usual
        assert getattr(sampling_params(msgspec.convert(more, kind)), name) == DEFAULTS[name]
    assert get_type_hints(GenerationBody.__mro__[1])[name] == get_type_hints(Drawn)[name] | None
    params = SamplingParams(**{name: usual})
    validate(params, 9)
    assert getattr(to_sampling(params, 1, 1, 99), name) == usual != (DEFAULTS[name] if name != "temperature" else None)


@EVERY
def test_each_is_refused_out_of_its_bounds_and_stored_as_nothing_below_its_least(name: str) -> None:
    parameter = PARAMETERS[name]
    outside = [parameter.low - 1, float("nan")] + [parameter.high + 1] * (parameter.high < float("inf"))
    for value in outside if parameter.dtype == "float32" else [int(parameter.low) - 1]:
        with pytest.raises(InvalidRequest, match=f"{name} is {value}: it must ") as refusal:
            validate(SamplingParams(**{name: value}), 9)
        assert refusal.value.param == name
    validate(SamplingParams(**{name: parameter.low}), 9)
    if parameter.least > parameter.low:
        assert getattr(to_sampling(SamplingParams(**{name: parameter.low}), 1, 1, 99), name) == 0


def test_a_checkpoint_sets_those_that_say_so() -> None:
    assert IN_CHECKPOINT == tuple(name for name in PARAMETERS if PARAMETERS[name].in_checkpoint)
    assert SamplingDefaults.__struct_fields__ == (*IN_CHECKPOINT, "max_tokens", "suppressed", "suppressed_first", "latest_first")


def test_rows_have_a_column_for_each() -> None:
    """Inputs of a step, the device's tables and what is fed and watched."""
    assert SamplingInputs._fields[:1] == ("temperature",) and {*ROW_DTYPES} <= {*SamplingInputs._fields}
    assert tuple(f"{rate}_penalty" for rate in Penalties._fields[1:4]) == PENALTIES
    assert {*FLOATS, *LONGS} - {"seed", "until", "bias_count"} == {*PARAMETERS} <= {*NAMES}
    assert FLOATS[0] == "temperature" and FLOATS[-len(PENALTIES) :] == PENALTIES and LONGS[-2:] == ("until", "bias_count")
    assert {*CHOOSING} == {"temperature", *FILTERS}


@pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled")
def test_the_compiled_kernels_take_the_same_columns_in_the_same_order() -> None:
    require_columns(ROW_DTYPES)
    swapped = dict(reversed(ROW_DTYPES.items()))
    for other in (swapped, ROW_DTYPES | {"seed": "float32"}, {**ROW_DTYPES, "more": "float32"}):
        with pytest.raises(StaleModule, match="which have the sampling columns temperature, .*build_ext --inplace"):
            require_columns(other)


def test_the_gpu_s_kernel_takes_the_same_columns_in_the_same_order() -> None:
    source = (ROOT / "cuda" / "sampling.cu").read_text()
    arguments = re.search(r"sample_rows\(long long \*tokens, const float \*logits,(.*?)long long stride", source, re.DOTALL)
    types = {"float": "float32", "long long": "int64"}
    found = [(name, types[kind]) for kind, name in re.findall(r"const (float|long long) \*(\w+)", arguments[1])]
    assert found == [*ROW_DTYPES.items()]
