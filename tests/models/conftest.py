"""Fixtures of the models' tests."""

from __future__ import annotations

import pytest

from vnext.kernels.table import plain_operations


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are loaded as plain tensors, which can be looked at, not packed for this machine's kernels."""
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: plain_operations())
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
