"""Adapters of the demo model."""

from __future__ import annotations

import pytest
from saved_adapters import DEMO, save_adapter

from vnext.runtime.protocol.lora_request import LoRARequest


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Small changes of the demo model, so that its answers stay varied."""
    parent = tmp_path_factory.mktemp("adapters")
    found = []
    for seed in range(5):
        folder = save_adapter(DEMO, parent / str(seed), seed, rank=2 + 3 * seed, lora_alpha=1)
        found.append(LoRARequest(f"tenant {seed}", seed, str(folder)))
    return found
