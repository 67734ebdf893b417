"""vnext: an LLM inference and serving engine built as one replicated state machine.

Imports public names lazily (PEP 562), so that `import vnext.state` loads no torch, zmq or aiohttp.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vnext.base.version import __version__

if TYPE_CHECKING:
    from vnext.api.async_llm import AsyncLLM
    from vnext.api.generated import Completion, Generated, Logprob, Scored
    from vnext.api.llm import LLM
    from vnext.runtime.client.output_stream import EngineDead, Refused
    from vnext.runtime.protocol.lora_request import LoRARequest
    from vnext.runtime.protocol.sampling_params import (
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
    "LLM": "vnext.api.llm",
    "AsyncLLM": "vnext.api.async_llm",
    "BeamSearchParams": "vnext.runtime.protocol.sampling_params",
    "Completion": "vnext.api.generated",
    "EngineDead": "vnext.runtime.client.output_stream",
    "Generated": "vnext.api.generated",
    "InvalidRequest": "vnext.runtime.protocol.sampling_params",
    "LoRARequest": "vnext.runtime.protocol.lora_request",
    "Logprob": "vnext.api.generated",
    "Refused": "vnext.runtime.client.output_stream",
    "RequestOutputKind": "vnext.runtime.protocol.sampling_params",
    "SamplingParams": "vnext.runtime.protocol.sampling_params",
    "Scored": "vnext.api.generated",
    "StructuredOutputsParams": "vnext.runtime.protocol.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vnext' has no attribute {name!r}; there are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
