"""The versions of a log's weights: where the files of each are, whether they have the log's digest, and a machine that is filled
with one of them.

A path that the user gives goes before the one that the log names. What the log names may be gone, or another's by now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vnext.base.spelling import reason
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import Checkpoint
from vnext.models.loading.update import check_update, open_update, tensors_digest
from vnext.replay.rerun.numerics import CannotRun
from vnext.replay.rerun.shard import Kernels, Shard
from vnext.state.state import Weights, label_of


class Versions:
    """The weights in the shards of one machine. `lacking` has a sentence for each version that is not here, `wrong` the digest of
    what the user gave for a version that has another one."""

    def __init__(self, path: Path, shards: Sequence[Shard], kernels: Kernels, given: Mapping[int, Path], checks: bool) -> None:
        """`path`: version 0. Without `checks` what is given, or lies where the log says, is taken as it is."""
        self._path, self._shards, self._kernels = path, shards, kernels
        self._given, self._checks = given, checks
        self._found: dict[str, Checkpoint | None] = {}
        self._now = ""
        self.lacking: dict[int, str] = {}
        self.wrong: dict[int, str] = {}

    def is_here(self, weights: Weights | None) -> bool:
        """Whether `take` can be called. Reads every byte of a version once."""
        if weights is None:
            return True
        if weights.label not in self._found:
            self._found[weights.label] = self._look(weights)
        return self._found[weights.label] is not None

    def take(self, weights: Weights | None) -> None:
        """Compute with these weights from now on; None: those of the log's model. Raises CannotRun."""
        label = label_of(weights)
        if label == self._now:
            return
        assert weights is None or self.is_here(weights), "only what is here is taken"
        try:
            tensors = self._found.get(label) or open_update(self._path)
            with self._kernels.used():
                for shard in self._shards:
                    shard.refill(tensors)
        except (ModelError, OSError) as error:
            raise CannotRun(reason(error, with_file=True)) from error
        self._now = label

    def _look(self, weights: Weights) -> Checkpoint | None:
        given, names = self._given.get(weights.version), self._shards[0].kept.names
        path = given or Path(weights.path)
        which = f"version {weights.version} of the weights ({weights.digest})"
        remedy = f"give the folder or file that has them with --weights {weights.version}=PATH"
        if given is None and (not weights.path or not (path.is_dir() or path.is_file())):
            self.lacking[weights.version] = f"{which} is not here: {remedy}"
            return None
        try:
            tensors = open_update(path)
            check_update(tensors, names, open_update(self._path).names())
            found = tensors_digest(tensors, names) if self._checks else weights.digest
        except (ModelError, OSError) as error:
            found, tensors = reason(error, with_file=True), None
        if tensors is not None and found == weights.digest:
            return tensors
        has = f"has the digest {found}" if tensors is not None else f"cannot be used ({found})"
        self.lacking[weights.version] = f"{path} {has}, and the log needs {which}: {remedy}"
        if given is not None:
            self.wrong[weights.version] = found
        return None
