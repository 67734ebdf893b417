"""Forks: what a fork of a program must not keep of the program's engines.

A fork has copies of every descriptor. A copy of a child's lifeline would let an engine outlive its owner, and one of a run
directory's lock would keep the folder of a dead start. Owns the list of who has such descriptors; in a fork each of them becomes
/dev/null, so that objects which close theirs later close no other file. Programs that are started, not forked, inherit none.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Owner(Protocol):
    """Has descriptors that belong to one process."""

    @property
    def own_descriptors(self) -> Iterable[int | None]:
        """Those that are open; None for one that is not."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def keep_from_forks(owner: Owner) -> None:
    """From now on no fork of this process keeps the owner's descriptors. The owner forgets one before it closes it."""
    _owners.add(owner)


def _let_go() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for owner in list(_owners):
        for descriptor in owner.own_descriptors:
            if descriptor is not None:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
