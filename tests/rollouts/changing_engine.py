"""An engine of the demo model whose weights the tests change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vnext.api.llm import LLM

Tensors = dict[str, torch.Tensor]


def made(log_dir: Path | str = "", model: str = "", **settings: Any) -> LLM:
    log = {"log": "full", "log_dir": str(log_dir)} if log_dir else {"log": "off"}
    return LLM(model, **{"executor": "inproc", "threads": 1, "num_blocks_override": 200, "check_laws": True, **log, **settings})
