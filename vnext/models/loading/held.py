"""Held: in what formats a checkpoint has its weights, and the bytes of it that a decoded token reads, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from vnext.kernels.format import GGUF_BLOCKS
from vnext.models.config.folder import read_config, settings_in
from vnext.models.config.model_config import load_config
from vnext.models.gguf.folder import linked_files
from vnext.models.loading.checkpoint import Checkpoint, open_checkpoint
from vnext.models.loading.recording import Recording
from vnext.models.registry import family


class _Read(Recording):
    """`tables`: what rows are looked up in; `experts`: of which a token meets some."""

    def __init__(self, tensors: Checkpoint) -> None:
        super().__init__(lambda name: name in tensors or tensors.format_of(name) is not None)
        self.tables, self.experts = set[str](), set[str]()

    def table(self, name: str) -> object:
        self.tables.add(name)
        return self.fused((name,))

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> object:
        self.experts.update(name for group in groups for name in group)
        return super().stacked(groups, gated)


def held(path: Path) -> str:
    """Such as "Q4_1 and Q8_0 blocks, 97.7 MB a token"; "" where all weights are floats. Raises ModelError."""
    config = load_config(path)
    with open_checkpoint(path) as own:
        stored = own.rooted()
        source = _Read(stored)
        family(config.architecture).assemble(source, config)
        sizes, formats = Counter[str](), Counter[str]()
        for name in source.read:
            format = stored.format_of(name)
            names = (name,) if format is None else format.tensors(name)
            sizes[name] = sum(stored.size_of(each) for each in names if each in stored)
            formats.update({format.name: sizes[name]} if format else {})
    experts = sum(sizes[name] for name in source.experts)
    met = experts * config.experts.per_token // config.experts.count if config.experts else 0
    apart = sum(sizes[name] for name in source.tables) if any(sizes[name] for name in source.heads) else 0
    total = sum(sizes.values()) - experts + met - apart
    return f"{scheme(name for name, _ in formats.most_common())}, {total / 1e6:,.1f} MB a token" if formats else ""


def is_quantised(path: Path) -> bool:
    """Whether weights of a checkpoint may be of few bits, by its configuration alone. Raises ModelError."""
    return bool(linked_files(path) or settings_in(path, read_config(path)))


def scheme(formats: Iterable[str]) -> str:
    """These formats in words."""
    names = list(formats)
    return f"{' and '.join(names)} {'blocks' if set(names) <= set(GGUF_BLOCKS) else 'codes'}"
