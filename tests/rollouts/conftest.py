"""Servers, as the tests of whole engines start them, and weights to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from changing_engine import Tensors
from safetensors.torch import load_file
from saved_adapters import DEMO

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))


@pytest.fixture(scope="session")
def old() -> Tensors:
    """The demo model's."""
    return load_file(DEMO / "model.safetensors")


@pytest.fixture(scope="session")
def new(old: Tensors) -> Tensors:
    """Others, of the same shapes."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (each.float() + 0.02 * torch.randn(each.shape, generator=generator)).to(each.dtype) for name, each in old.items()
    }
