"""Targets: the packed weights of a model that adapters may change. The loader notes them; adapters are fitted to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from vnext.models.layers.sharding import Axis, LayoutTable, layout_of


class Target(NamedTuple):
    """A packed weight that an adapter may change, and the checkpoint's names of what it is made of, top to bottom."""

    names: tuple[str, ...]
    weight: Any


def may_be_target(names: tuple[str, ...], layouts: LayoutTable) -> bool:
    """Whether these weights are linear layers, whose outputs do not take turns, and neither embedding nor head."""
    found = [layout_of(name, layouts) for name in names]
    return all(Axis.VOCAB not in layout.out and layout.inner is not None and not layout.by_state for layout in found)
