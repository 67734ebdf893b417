"""vnext on Ray: an engine's hosts in placement groups, a deployment for Ray Serve with a router of its own, a stage for Ray Data.

What needs Ray stands here and is imported by nothing else of vnext; `pip install 'vnext[ray]'`. What ranks compute and how they are
replaced does not belong here: both are the same without Ray.
Has met Ray 2.60 on x86-64 Linux, two nodes of one machine: `pytest tests/hosts/test_on_ray.py`. Has not met two machines, nor GPUs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PUBLIC = {"Answers": "batches", "LLMServer": "serving", "app": "serving", "ViewRouter": "routing"}
"""Name -> its module, imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
