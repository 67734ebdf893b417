"""vnext: an LLM inference and serving engine built as one replicated state machine.

Imports public names lazily (PEP 562), so that `import vnext.state` loads no torch, zmq or aiohttp.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vnext.version import __version__

if TYPE_CHECKING:
    from vnext.generated import Completion, Generated, Logprob, Scored
    from vnext.llm import LLM
    from vnext.lora_request import LoRARequest
    from vnext.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "Completion",
    "Generated",
    "LoRARequest",
    "Logprob",
    "SamplingParams",
    "Scored",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "vnext.llm",
    "BeamSearchParams": "vnext.sampling_params",
    "Completion": "vnext.generated",
    "Generated": "vnext.generated",
    "LoRARequest": "vnext.lora_request",
    "Logprob": "vnext.generated",
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
