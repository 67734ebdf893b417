"""Failures of single requests, as the first rank reports them with a step: constraints that it could not follow, and NaN.

Counts the latter and says so once. Decides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vnext.runtime.engine.facility import NO_ERRORS
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.state.samples import still_owed
from vnext.state.state import State

log = logging.getLogger(__name__)


class Failures:
    """`spoilt`: how many requests ended because of what is no number."""

    def __init__(self) -> None:
        self.spoilt = 0

    def errors(self, state: State, failed: tuple[tuple[int, str], ...]) -> Mapping[int, str]:
        """Which requests are to be aborted before they get the tokens that a rank chose nevertheless, and why. One that has given
        way since the step was planned fails again when it is back: it is still owed tokens."""
        if not failed:
            return NO_ERRORS
        owed = still_owed(state)
        found = {id_: why for id_, why in failed if id_ in owed}
        count = sum(why == NOT_A_NUMBER for why in found.values())
        if count and not self.spoilt:
            log.error("A request has ended because %s. More of them are counted in vnext_requests_spoilt_total.", NOT_A_NUMBER)
        self.spoilt += count
        return found
