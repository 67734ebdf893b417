"""vnext: an LLM inference and serving engine built as one replicated state machine.

Imports public names lazily (PEP 562), so that `import vnext.state` loads no torch, zmq or aiohttp.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vnext.version import __version__

if TYPE_CHECKING:
    from vnext.async_llm import AsyncLLM
    from vnext.generated import Completion, Generated, Logprob, Scored
    from vnext.llm import LLM
    from vnext.lora_request import LoRARequest
    from vnext.runtime.client.output_stream import EngineDead, Refused
    from vnext.sampling_params import (
        BeamSearchParams,
        InvalidRequest,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "Completion",
    "EngineDead",
    "Generated",
    "InvalidRequest",
    "LoRARequest",
    "Logprob",
    "Refused",
    "RequestOutputKind",
    "SamplingParams",
    "Scored",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "vnext.llm",
    "AsyncLLM": "vnext.async_llm",
    "BeamSearchParams": "vnext.sampling_params",
    "Completion": "vnext.generated",
    "EngineDead": "vnext.runtime.client.output_stream",
    "Generated": "vnext.generated",
    "InvalidRequest": "vnext.sampling_params",
    "LoRARequest": "vnext.lora_request",
    "Logprob": "vnext.generated",
    "Refused": "vnext.runtime.client.output_stream",
    "RequestOutputKind": "vnext.sampling_params",
    "SamplingParams": "vnext.sampling_params",
    "Scored": "vnext.generated",
    "StructuredOutputsParams": "vnext.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vnext' has no attribute {name!r}; there are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
