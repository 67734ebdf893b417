"""An update of the weights on a client's side: tensors as files that the ranks can read, and an update that is sent in pieces.

Owns what was sent between the start of an update and its end. The engine core knows only of whole files, and of the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vnext.runtime.client.connection import weights_folder
from vnext.runtime.client.pending_operations import BadTensors, NotDone
from vnext.runtime.protocol.operations import AnyOperation, CheckPiece, Mode, SharedTensor, UpdateWeights

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | Sequence[SharedTensor] | str | Path
NOT_STARTED = "no update of the weights has been started: start_weight_update comes before finish_weight_update"


class WeightUpdate:
    """An update that has been started. `paths` are its pieces so far."""

    def __init__(self, partial: bool) -> None:
        self.partial, self.paths = partial, list[str]()

    def require_piece(self, version: int, mode: Mode, partial: bool) -> None:
        """Raise NotDone for what belongs to the start or the end of the update."""
        if version or mode != "wait" or partial:
            names = "partial to start_weight_update, version and mode to finish_weight_update"
            raise NotDone(f"between start_weight_update and finish_weight_update give only weights: {names}")

    def forget(self, address: str) -> None:
        """Remove what was sent: it is not going to be finished."""
        for path in map(Path, self.paths):
            if path.parent == weights_folder(address):
                with suppress(OSError):
                    path.unlink()


class WeightUpdates:
    """The updates of one program, one call after another. `operate` carries out an operation of the engine at `address`."""

    def __init__(self, operate: Callable[[AnyOperation], dict[str, Any]], address: str) -> None:
        self._operate, self._address = operate, address
        self._started: WeightUpdate | None = None

    def update(self, weights: Tensors, version: int, mode: Mode, partial: bool) -> dict[str, Any]:
        """Raises NotDone, BadTensors, EngineDead; these too do."""
        if self._started is None:
            paths = (file_of(weights, self._address),)
            return self._operate(UpdateWeights(paths=paths, version=version, mode=mode, partial=partial))
        self._started.require_piece(version, mode, partial)
        path = file_of(weights, self._address)
        self._operate(CheckPiece(path=path))
        self._started.paths.append(path)
        return {}

    def start(self, partial: bool) -> None:
        if self._started is not None:
            self._started.forget(self._address)
        self._started = WeightUpdate(partial)

    def finish(self, version: int, mode: Mode) -> dict[str, Any]:
        update, self._started = self._started, None
        return self._operate(finished(update, version, mode))


def file_of(weights: Tensors, address: str) -> str:
    """The file or folder of these tensors: as it is given, or written for the engine at `address`. Raises BadTensors, OSError."""
    if isinstance(weights, str | Path):
        return str(Path(os.path.expanduser(weights)).resolve())  # as it is, where there is no such home
    from vnext.runtime.client.tensor_file import write_shared, write_tensors

    folder = weights_folder(address)
    if isinstance(weights, Mapping):
        return str(write_tensors(weights, folder))
    given: list[Any] = list(weights)
    shared = [isinstance(each, SharedTensor) for each in given]
    if any(shared) and not all(shared):
        raise BadTensors("some tensors are in shared memory and others are not: give them in two updates")
    return str(write_shared(given, folder) if any(shared) else write_tensors(given, folder))


def finished(update: WeightUpdate | None, version: int, mode: Mode) -> UpdateWeights:
    """What the engine core is asked for at the end of an update. Raises NotDone."""
    if update is None:
        raise NotDone(NOT_STARTED)
    if not update.paths:
        raise NotDone("the update of the weights that was started has no tensors; nothing has changed")
    return UpdateWeights(paths=tuple(update.paths), version=version, mode=mode, partial=update.partial)
