"""What a program may do with an engine that runs, beside asking it for answers: weights, pauses, sleep. A part of LLM.

Names and arguments are vLLM's where it has them. Each call returns when the engine has done what it says, or raises NotDone
with one sentence, and nothing has changed. docs/weights.md says what happens to requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vnext.runtime.protocol.operations import (
    TAGS,
    CallRanks,
    Mode,
    PauseEngine,
    Plain,
    PutToSleep,
    Residence,
    ResumeEngine,
    Tag,
    WakeUp,
)

if TYPE_CHECKING:  # the client imports slowly: the engine starts meanwhile
    from vnext.runtime.client.client_sync import SyncEngineClient
    from vnext.runtime.client.weight_update import Tensors, WeightUpdates


class EngineOperations:
    """`_client` is connected to the engine core at `_address`."""

    _client: SyncEngineClient
    _address: str
    _updates: WeightUpdates | None = None

    def update_weights(
        self, weights: Tensors, *, version: int = 0, mode: Mode = "wait", partial: bool = False
    ) -> dict[str, Any]:
        """Compute with other weights from the next step on; returns {"version", "digest"}.

        `weights`: tensors of the model by their names in the checkpoint (numpy or torch, float32, bfloat16 or float16), or
        SharedTensors, or the folder or safetensors file that has them: every one, or with `partial` some, and the others stay.
        `version` 0 is the next one. `mode`: what becomes of requests that have begun. Behind `start_weight_update` only `weights`
        are given, the engine checks them and goes on as before; returns {}. Raises NotDone, BadTensors, EngineDead.
        """
        return self._weight_updates().update(weights, version, mode, partial)

    def start_weight_update(self, *, partial: bool = False) -> None:
        """The calls of `update_weights` that follow are one change of the weights, which `finish_weight_update` makes. What was
        sent before and not finished is forgotten. `partial`: tensors that are not sent stay as they are."""
        self._weight_updates().start(partial)

    def finish_weight_update(self, *, version: int = 0, mode: Mode = "wait") -> dict[str, Any]:
        """Compute with what was sent since `start_weight_update`, as `update_weights` does. Where it raises NotDone the update is
        over too, and nothing has changed."""
        return self._weight_updates().finish(version, mode)

    def _weight_updates(self) -> WeightUpdates:
        self._client.require_alive()
        if self._updates is None:
            from vnext.runtime.client.weight_update import WeightUpdates
            self._updates = WeightUpdates(self._client.operate, self._address)
        return self._updates

    def pause(self, mode: Mode = "wait") -> None:
        """Let nothing begin until `resume`. "wait": those that have begun finish first; "keep": they stay where they are; "abort":
        they end. Raises NotDone, EngineDead."""
        self._client.operate(PauseEngine(mode=mode))

    def resume(self) -> None:
        """Go on after `pause`. Raises NotDone, EngineDead."""
        self._client.operate(ResumeEngine())

    def sleep(self, level: int = 1, *, mode: Mode = "wait") -> None:
        """Give the memory of cache and weights back, on the CPU. Level 1: `wake_up` reads the weights from their files again.
        Level 2 forgets them: `update_weights` comes before `wake_up`. Raises NotDone, EngineDead."""
        self._client.operate(PutToSleep(level=level, mode=mode))

    def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """Take the memory back, of "weights" and "kv_cache" or only of some; the engine goes on when it has all. Raises NotDone,
        EngineDead."""
        self._client.operate(WakeUp(tags=TAGS if tags is None else tuple(tags)))

    def collective_rpc(self, method: str, timeout: float | None = None, args: Sequence[Plain] = (),
                       kwargs: Mapping[str, Plain] | None = None) -> list[Any]:  # fmt: skip
        """Call a function that the ranks know by this name (vnext/runtime/rank/functions.py) on each of them; their values, by
        rank. Arguments go by name. Raises NotDone, EngineDead."""
        from vnext.runtime.client.pending_operations import NotDone
        if not isinstance(method, str):
            raise NotDone("collective_rpc calls functions by their names: code is not sent to ranks")
        if args or timeout is not None:
            raise NotDone("collective_rpc takes arguments by name, in kwargs, and no timeout: leave args and timeout out")
        values: list[Any] = self._client.operate(CallRanks(function=method, arguments=dict(kwargs or {})))
        return values

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds of requests that have ended."""
        self._client.reset_prefix_cache()

    @property
    def residence(self) -> Residence:
        """Whether the engine is paused or asleep, the version and digest of its weights, and its ranks' resident bytes."""
        stats = self._client.stats
        return stats.residence if stats is not None else Residence()
