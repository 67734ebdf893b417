"""Tests that need a GPU: all are skipped, with the reason, where torch can use none."""

from __future__ import annotations

import pytest
import torch


def why_not() -> str:
    """Why nothing of this folder can be run here; "" where it can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no GPU here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not():
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))
