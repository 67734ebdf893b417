"""Decision log: each choice of `vnext router` among its servers, in the files that `vnext-replay route` reads.

Owns what is recorded of a choice. It is off unless a folder is given: a router writes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vnext.base.version import __version__
from vnext.routing.decision_file import DecisionFile, header_of
from vnext.routing.decisions import NOBODY, Decision
from vnext.routing.policies import Arriving, Candidate


class DecisionsUnusable(Exception):
    """Decisions cannot be written where they should: one sentence with the remedy."""


class DecisionLog:
    """Mutable. `name` tells the routers of one folder apart."""

    def __init__(self, folder: str, name: str, policy: str, servers: Sequence[str]) -> None:
        """Raises DecisionsUnusable."""
        try:
            self.file = DecisionFile(Path(folder).expanduser(), header_of(__version__, policy, servers), name)
        except OSError as error:
            why = f"decisions cannot be written to {folder} ({error.strerror}): name another --decisions-dir"
            raise DecisionsUnusable(why) from error

    def add(self, arriving: Arriving, candidates: Sequence[Candidate], place: int | None) -> None:
        """A choice; None: no server was ready."""
        chosen, time_us = NOBODY if place is None else place, self.file.clock_us()
        self.file.write(Decision(arriving=arriving, candidates=tuple(candidates), chosen=chosen, time_us=time_us))
