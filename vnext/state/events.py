"""Events: the facts of a run, in the order in which the engine core numbered them. Each with who emits it and who reacts.

Token ids are little-endian int32 bytes.
    EngineStarted      engine core; everyone       first record of every log
    RequestArrived     engine core; scheduler      a client's request, already checked and numbered
    RequestAborted     engine core; scheduler      client gone, stop string found, shutdown
    StepPlanned        engine core; ranks          the decision, as its difference from the expected one
    StepCommitted      engine core; every rank     sampled tokens become part of the state (each rank knows its own)
    PrefixCacheReset, DraftCostsMeasured, MemoryRanShort, StepRewound, StepLimitRaised    forgotten; costs of drafts; sizes of steps
    AdapterLoaded, AdapterEvicted, EngineRecovered, RequestResumed    slots; the ranks' memory is gone; another engine had begun it
    EnginePaused, WeightsChanged, TierOpened, TierChanged, BlocksPromoted, PromotionEnded    who goes on; weights; blocks on disk
    ClockTicked, PinsYielded, BlocksHandedOver, BlocksReceived, InputEncoded, InputsSought, InputsFound   time, pins, blocks, inputs
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NewType

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling
from vnext.state.traits import Leave, Traits

if TYPE_CHECKING:  # modules that only pass events on start faster without numpy
    import numpy as np

RequestId = NewType("RequestId", int)
AbortReason = Literal["client", "stop", "shutdown", "error"]
Pause = Literal["", "wait", "keep", "abort", "sleep"]


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all events, each of which says what it is in its traits."""

    traits: ClassVar[Traits]


class EngineStarted(Event, frozen=True, tag=0):
    """`environment` is the determinism environment: versions, instruction set, threads, devices."""

    config: SchedulerConfig
    model: str
    model_digest: str
    world_size: int
    environment: dict[str, str]
    started_ns: int

    traits: ClassVar[Traits] = Traits(lines=("the engine starts",), public=("model", "model_digest"))


class RequestArrived(Event, frozen=True, tag=1):
    """`id` counts arrivals from 0 without gaps; `name` is the client's label. `prompt` is int32 bytes, not empty.
    `generated` stays empty (see RequestResumed). `client` tells clients apart, 0 where none is known, and
    `weight` is its share in turns."""

    id: RequestId
    name: str
    prompt: bytes
    sampling: Sampling
    priority: int
    arrival_ns: int
    cache_salt: str = ""
    generated: bytes = b""
    client: int = 0
    weight: int = 1

    traits: ClassVar[Traits] = Traits(
        lines=("request {id} arrives with {prompt} tokens, priority {priority}", "request {id} arrives with {prompt} tokens"),
        tokens=("prompt",),
        keyed=("name", "cache_salt", "client", "sampling"),
        public=("generated",),
        requests=("id",),
        shrinks=("priority", "cache_salt", "arrival_ns", "client", "weight"),
    )


class RequestAborted(Event, frozen=True, tag=2):
    """Aborts `ids`. An id that has already ended is ignored, as a stop string may race with the last token."""

    ids: tuple[RequestId, ...]
    reason: AbortReason

    traits: ClassVar[Traits] = Traits(
        lines=("request {ids} aborted ({reason})",), public=("reason",), requests=("ids",), leave=Leave("requests", "ids")
    )


class StepPlanned(Event, frozen=True, tag=3):
    """A plan, as its difference from the expected plan, in which every running request advances by what it needs.

    `preempted`: rows (indices in running order) to preempt. `changed`: (row, tokens) where the decision differs from
    the expected plan. `admitted`: (place in the waiting queue, tokens), in order of admission; places count after the
    preempted requests have returned to the queue.
    """

    step: int
    preempted: tuple[int, ...] = ()
    changed: tuple[tuple[int, int], ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()

    traits: ClassVar[Traits] = Traits(lines=("step {step} is planned",), leave=Leave("rows", "preempted"))


class StepCommitted(Event, frozen=True, tag=4):
    """The sampled tokens of one step in schedule order (int32 bytes), one for each request that sampled.

    With drafts a request may have sampled more: `counts` has the number of its tokens and `drafted` the number of drafts that
    were computed for it (uint8 each, one per request that sampled). Both are empty in a step without drafts.
    """

    step: int
    tokens: bytes
    counts: bytes = b""
    drafted: bytes = b""

    traits: ClassVar[Traits] = Traits(
        lines=("step {step} gives {tokens} tokens",), tokens=("tokens",), public=("counts", "drafted")
    )


class PrefixCacheReset(Event, frozen=True, tag=5):
    """Empties the prefix index. Kept pages lose their hashes; held pages are no longer shared with new requests."""

    traits: ClassVar[Traits] = Traits(lines=("prefix cache reset",), marks="engine")


class AdapterLoaded(Event, frozen=True, tag=6):
    """`slot` holds the LoRA adapter whose files have this `digest`. Clients know it by `name`; ranks have read it from the folder
    `path`."""

    name: str
    digest: str
    slot: int
    path: str = ""

    traits: ClassVar[Traits] = Traits(
        lines=("adapter {name} in slot {slot}", "adapter {digest} in slot {slot}"),
        private=("name", "path"),
        public=("digest",),
        marks="engine",
    )


class AdapterEvicted(Event, frozen=True, tag=7):
    """`slot` is empty again."""

    slot: int

    traits: ClassVar[Traits] = Traits(lines=("slot {slot} empty",), marks="engine")


class EngineRecovered(Event, frozen=True, tag=8):
    """The ranks have lost their memory, and other ranks begin from the state behind this event: nothing is in flight, every
    running request waits again with the tokens it has, and no page and no slot holds anything.

    `cause` is a sentence. Where an engine core had ended, this is its successor's second event: `log` is the folder of the log
    that ended ("" without one) and `frames` what it holds. Requests with ids below `cautious`, those that are still to come
    included, join the batch one at a time.
    """

    cause: str
    log: str = ""
    frames: int = 0
    cautious: int = 0

    traits: ClassVar[Traits] = Traits(
        lines=("recovery: {cause} (continues {log})", "recovery: {cause}"),
        folders=("log",),
        public=("cause",),
        leave=Leave("everyone"),
        transfer="loses",
        marks="engine",
    )


class RequestResumed(RequestArrived, frozen=True, tag=9):
    """A request that another engine core had begun. `generated` are the tokens that its client has (int32 bytes, maybe none): the
    next one is drawn as if this engine had drawn them."""

    traits: ClassVar[Traits] = Traits(
        lines=("request {id} comes back with {prompt} tokens of its prompt and {generated} of its answer",),
        tokens=("prompt", "generated"),
        keyed=("name", "cache_salt", "client", "sampling"),
        requests=("id",),
        shrinks=("priority", "cache_salt", "arrival_ns", "client", "weight"),
    )


class EnginePaused(Event, frozen=True, tag=10):
    """From here on the scheduler plans by `mode`: "" as usual; "wait" only for requests that have begun, "keep" and "abort" (which
    ends all requests first) not at all, and "sleep" not at all because pages have no memory: nothing is in flight, running
    requests wait again, and no block is a hit any more."""

    mode: Pause

    traits: ClassVar[Traits] = Traits(
        lines=("paused ({mode})", "resumed"), public=("mode",), leave=Leave("everyone", "mode", "sleep"), marks="engine"
    )


class WeightsChanged(Event, frozen=True, tag=11):
    """The ranks compute with the weights of this `digest` (models/loading/update.py) from now on. `version` grows with every
    change, from 0. Only a paused engine with nothing in flight changes its weights. Requests that have
    begun wait again, and every block has another name. `path` is the folder or file that ranks have read.
    """

    version: int
    digest: str
    path: str = ""

    traits: ClassVar[Traits] = Traits(
        lines=("weights, version {version} ({digest})",),
        private=("path",),
        public=("digest",),
        leave=Leave("everyone"),
        marks="engine",
    )


class TierOpened(Event, frozen=True, tag=12):
    """The disk tier holds these `blocks` (their hashes, 16 bytes each, oldest first), `capacity` at most, and of recurrent layers
    `snapshots` behind these, `snapshots_max` at most."""

    capacity: int
    blocks: bytes = b""
    snapshots_max: int = 0
    snapshots: bytes = b""

    traits: ClassVar[Traits] = Traits(
        lines=("disk tier: {blocks} blocks, {capacity} at most",), hashes=("blocks", "snapshots"), marks="engine"
    )


class TierChanged(Event, frozen=True, tag=13):
    """Every rank has written the blocks `stored`; `gone` are on disk no longer, evicted or damaged; `kept` count as new again.
    Hashes of 16 bytes each."""

    stored: bytes = b""
    gone: bytes = b""
    kept: bytes = b""

    traits: ClassVar[Traits] = Traits(
        lines=("blocks on disk: {stored} stored, {gone} gone, {kept} kept",), hashes=("stored", "gone", "kept")
    )


class SnapshotsChanged(TierChanged, frozen=True, tag=27):
    """The same of snapshots, by the hashes of their blocks."""

    traits: ClassVar[Traits] = Traits(
        lines=("snapshots on disk: {stored} stored, {gone} gone, {kept} kept",), hashes=("stored", "gone", "kept")
    )


class BlocksPromoted(Event, frozen=True, tag=14):
    """Transfer `transfer` reads the next `count` blocks of a waiting request, behind those that memory has, from disk, and the
    snapshot behind the first `edge`, 0 for none."""

    transfer: int
    id: RequestId
    count: int
    edge: int = 0

    traits: ClassVar[Traits] = Traits(
        lines=("{count} blocks of request {id} are read; others may overtake it",),
        requests=("id",),
        transfer="begins",
        marks="request",
    )


class PromotionEnded(Event, frozen=True, tag=15):
    """Every rank has read the first `count` blocks of a transfer as they were written, its snapshot as the last; 0 also where it
    was given up."""

    transfer: int
    count: int = 0

    traits: ClassVar[Traits] = Traits(lines=("transfer {transfer}: {count} blocks are back from disk",), transfer="ends")


class ClockTicked(Event, frozen=True, tag=16):
    """`seconds` have passed since the engine started: the only clock of a state. It ticks while pins depend on it, and those that
    have ended are over."""

    seconds: int

    traits: ClassVar[Traits] = Traits(lines=("{seconds} s since the start",))


class PinsYielded(Event, frozen=True, tag=17):
    """The `count` pins nearest to their ends are over, as a request that is alone lacks pages."""

    count: int

    traits: ClassVar[Traits] = Traits(lines=("{count} pins yield",), marks="engine")


class BlocksHandedOver(Event, frozen=True, tag=20):
    """A running request's first `count` blocks, full ones of its prompt, go where another engine's ranks find them by name."""

    id: RequestId
    count: int

    traits: ClassVar[Traits] = Traits(
        lines=("{count} blocks of request {id} go to another engine",), requests=("id",), marks="request"
    )


class BlocksReceived(PromotionEnded, frozen=True, tag=21):
    """The `count` blocks of this transfer came from another engine: their `names` (16 bytes each), and of each block the checksum
    (16 bytes) of every rank's part, as that engine made it and the rank found it."""

    names: bytes = b""
    checksums: bytes = b""

    traits: ClassVar[Traits] = Traits(
        lines=("transfer {transfer}: {count} blocks came from another engine",),
        hashes=("names", "checksums"),
        transfer="ends",
    )


class DraftCostsMeasured(Event, frozen=True, tag=22):
    """What drafts cost, as the engine has measured it: this decides from now on."""

    row_cost: int
    step_cost: int
    row_cost_many: int

    traits: ClassVar[Traits] = Traits(
        lines=("a draft costs {row_cost} thousandths of a step, {row_cost_many} beside many, and drafting {step_cost}",),
        marks="engine",
    )


class MemoryRanShort(Event, frozen=True, tag=23):
    """Step `step` lacks memory: what is in flight is over, all wait again, steps take `limit` tokens at most."""

    step: int
    limit: int
    cause: str

    traits: ClassVar[Traits] = Traits(
        lines=("memory ran short at step {step}, steps take {limit} tokens at most: {cause}",), public=("cause",),
        leave=Leave("everyone"), marks="engine",
    )  # fmt: skip


class StepRewound(MemoryRanShort, frozen=True, tag=25):
    """As MemoryRanShort, but all go on from before the step."""

    traits: ClassVar[Traits] = Traits(
        lines=("memory ran short at step {step}, all go on from before it, steps take {limit} tokens at most: {cause}",),
        public=("cause",), leave=Leave("back"), marks="engine",
    )  # fmt: skip


class StepLimitRaised(Event, frozen=True, tag=24):
    """Memory has sufficed: steps may take `limit` tokens."""

    limit: int

    traits: ClassVar[Traits] = Traits(lines=("steps take {limit} tokens at most again",), marks="engine")


class InputEncoded(Event, frozen=True, tag=26):
    """The next step computes `units` more of the input at `place` of a request."""

    id: RequestId
    place: int
    units: int

    traits: ClassVar[Traits] = Traits(
        lines=("request {id}: {units} units of the input at {place} are encoded",), requests=("id",), marks="request"
    )


class InputsSought(Event, frozen=True, tag=28):
    """Ranks look for a waiting request's inputs in files."""

    id: RequestId

    traits: ClassVar[Traits] = Traits(
        lines=("vectors for request {id} are looked for; others may overtake it",), requests=("id",), marks="request"
    )


class InputsFound(Event, frozen=True, tag=29):
    """Every rank has the vectors of those at these `places`."""

    id: RequestId
    places: tuple[int, ...] = ()

    traits: ClassVar[Traits] = Traits(
        lines=("request {id}: vectors of the inputs at {places} are there", "request {id}: no vectors are there"),
        requests=("id",), marks="request",
    )  # fmt: skip


AnyEvent = (
    EngineStarted | RequestArrived | RequestAborted | StepPlanned | StepCommitted | PrefixCacheReset | AdapterLoaded
    | AdapterEvicted | EngineRecovered | RequestResumed | EnginePaused | WeightsChanged | TierOpened | TierChanged
    | BlocksPromoted | PromotionEnded | ClockTicked | PinsYielded | BlocksHandedOver | BlocksReceived
    | DraftCostsMeasured | MemoryRanShort | StepRewound | StepLimitRaised | InputEncoded | SnapshotsChanged
    | InputsSought | InputsFound
)  # fmt: skip


def first_of(events: Sequence[AnyEvent]) -> EngineStarted:
    """The event that starts a run."""
    started = events[0]
    assert isinstance(started, EngineStarted), f"a run begins with EngineStarted, not with {type(started).__name__}"
    return started


def plan_of(event: AnyEvent) -> StepPlanned | None:
    """The event as a decision, None for one that is another fact."""
    return event if type(event) is StepPlanned else None  # isinstance would ask the metaclass of structs


def generated_by(event: RequestArrived) -> bytes:
    """The tokens (int32 bytes) that an arriving request has beside its prompt."""
    return event.generated if isinstance(event, RequestResumed) else b""


def pack_tokens(tokens: np.ndarray | list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32 bytes. Raises OverflowError for a number that has no place in them."""
    if isinstance(tokens, (list, tuple)):
        return array("i", tokens).tobytes()
    return tokens.astype("<i4", copy=False).tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """The inverse of `pack_tokens`: a read-only int32 array."""
    import numpy as np

    return np.frombuffer(data, np.int32)
