"""Changes of the weights in a simulation: when one is due, decided from the plain state, and what must be refused before.

The engine's own decision is in vnext/state/facilities/weights.py.
"""

from __future__ import annotations

from tests.sim.deciding import DecidingCore
from vnext.sim.laws import going
from vnext.sim.rng import Rng
from vnext.state.events import AnyEvent, EnginePaused, Pause, WeightsChanged


class WeightChanges:
    """The change that an engine has paused for. Mutable; an engine that starts anew has none."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._mode: Pause = ""

    def begin(self, core: DecidingCore, mode: Pause) -> bool:
        """Whether the engine pauses in `mode` now: not while it has paused for another change."""
        if self._mode:
            return False
        self._mode = mode
        if mode == "abort" and core.state.requests:
            core.require_refused(EnginePaused(mode="abort"))
        return True

    def events(self, core: DecidingCore) -> tuple[AnyEvent, ...]:
        """The change and what surrounds it, once nothing is computed with the old weights; until then it must be refused."""
        seen, mode, weights = core.seen, self._mode, core.state.weights
        version = weights.version + 1 if weights else 1
        change = WeightsChanged(version=version + self._rng.below(2), digest=self._rng.choose(("a", "b")))
        reads = core.state.tier is not None and bool(core.state.tier.transfers)
        if not mode or seen.in_flight or reads or (mode == "wait" and (seen.rows.id or going(seen))):
            core.require_refused(change)
            if seen.in_flight or reads:
                core.require_refused(EnginePaused(mode="sleep"))
            return ()
        self._mode = ""
        resumes = EnginePaused(mode="")
        if mode == "sleep":
            asleep = EnginePaused(mode="sleep")
            return (asleep, change, resumes) if self._rng.happens(50) else (asleep, resumes)
        return change, resumes
