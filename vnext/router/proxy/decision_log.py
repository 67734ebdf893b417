"""Decision log: each choice of `vnext router` among its servers, in the files that `vnext-replay route` reads.

Owns the place of a choice in time and in the files. It is off unless a folder is given: a router writes nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from vnext.router.decision_file import DecisionFile
from vnext.router.decisions import FORMAT_VERSION, NOBODY, Decision, Header
from vnext.router.policies import Arriving, Candidate
from vnext.version import __version__


class DecisionsUnusable(Exception):
    """Decisions cannot be written where they should: one sentence with the remedy."""


class DecisionLog:
    """Mutable. `name` tells the routers of one folder apart."""

    def __init__(self, folder: str, name: str, policy: str, servers: Sequence[str]) -> None:
        """Raises DecisionsUnusable."""
        header = Header(
            format_version=FORMAT_VERSION, code_version=__version__, policy=policy, replicas=tuple(servers),
            started_ns=time.time_ns(),
        )  # fmt: skip
        self._began_ns = time.monotonic_ns()
        try:
            self.file = DecisionFile(Path(folder).expanduser(), header, name)
        except OSError as error:
            why = f"decisions cannot be written to {folder} ({error.strerror}): name another --decisions-dir"
            raise DecisionsUnusable(why) from error

    def add(self, arriving: Arriving, candidates: Sequence[Candidate], place: int | None) -> None:
        """A choice; None: no server was ready."""
        time_us, chosen = (time.monotonic_ns() - self._began_ns) // 1000, NOBODY if place is None else place
        self.file.write(Decision(arriving=arriving, candidates=tuple(candidates), chosen=chosen, time_us=time_us))
