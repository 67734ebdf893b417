"""Steps on a device: launched now, waited for later. Owns the pending steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from vnext.runtime.gpu.steps import DeviceSteps, PendingStep
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.runtime.rank.steps import LOOK_S, Computed, with_drafts
from vnext.runtime.transport.collectives.group import require_whole_group
from vnext.state.events import pack_tokens
from vnext.state.state import State


class LaterSteps:
    """As Steps, but `launch` does not wait for the device."""

    look_s = LOOK_S

    def __init__(self, make_steps: Callable[[State], DeviceSteps], adapters: AdapterSlots | None = None) -> None:
        """`make_steps` gets the engine's first state, takes the cache's memory and captures graphs."""
        self._make_steps, self.adapters = make_steps, adapters
        self.made: DeviceSteps | None = None
        self._config = None
        self._pending_steps: deque[PendingStep] = deque()

    def start(self, state: State) -> None:
        self.made, self._config = self._make_steps(state), state.config

    def launch(self, state: State) -> None:
        self._pending_steps.append(self.made.launch(state))

    def is_there(self) -> bool:
        return bool(self._pending_steps) and self._pending_steps[0].is_there()

    def wait(self) -> Computed:
        pending_step = self._pending_steps.popleft()
        outputs = pending_step.outputs()
        require_whole_group()
        words = () if pending_step.fed is None else pending_step.fed.words(self._config)
        seconds = time.perf_counter() - pending_step.asked_s
        found = pending_step.samples and pending_step.samples.kept
        tokens = pack_tokens(found.tokens if found else outputs.tokens)
        done = Computed(tokens, outputs.logprobs, seconds, words, pending_step.failures(outputs), outputs.prompts)
        return with_drafts(done, found) if found else done
