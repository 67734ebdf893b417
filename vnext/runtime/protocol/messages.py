"""Messages between processes that are not events: API <-> engine core, ranks -> engine core.

Owns their types and their one codec (msgpack, typed, tagged). Nothing is pickled. The decoder rejects unknown tags and wrong
types. Token ids are little-endian int32 bytes, as in `vnext.state.events`.
"""

from __future__ import annotations

import hashlib

import msgspec

from vnext.runtime.protocol.operations import AnyOperation, Residence
from vnext.runtime.protocol.stats import AdapterStats, CacheLosses, CacheMiss, ExpertStats, PinStats, StateStats, TierStats
from vnext.state.config import SchedulerConfig
from vnext.state.events import AbortReason, StepCommitted
from vnext.state.params import Sampling


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all messages."""


# ---- API process -> engine core ----------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=0):
    """A client's first message; the engine core answers with EngineReady."""


SALT_END = "\x1f"
"""Ends the part of a cache salt by which a server tells its tenants apart; what the client gave follows."""


class AdapterFiles(Message, frozen=True):
    """A LoRA adapter: the name under which clients know it, the digest of its files (models/config/adapter_config.py) and
    the folder that holds them."""

    name: str
    digest: str
    path: str


class SubmitRequest(Message, frozen=True, tag=1):
    """`name` is unique among the client's live requests. Without `has_seed` the engine core draws the seed. `adapter`: what the
    request is computed with beside the model.

    `deaths` is 0 for a new request. Else it counts the engine cores in a row that ended with this request and gave it no token
    since the one before, and `generated` are the tokens that its client has (int32 bytes).
    `hands_over`: put the prompt's full blocks where another engine's ranks find them; the last output then has the ticket that
    says where. `ticket`: that of an engine which has done so (handover/tickets.py), "" for none; `inputs_ticket`: that of one which
    has encoded its inputs. `client`: a number, 0 for none; `weight`: its share in turns.
    `encodes`: an engine that encodes inputs for others makes the vectors of those in the prompt, and nothing else is asked."""

    name: str
    prompt: bytes
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    has_seed: bool = True
    adapter: AdapterFiles | None = None
    generated: bytes = b""
    deaths: int = 0
    hands_over: bool = False
    ticket: str = ""
    client: int = 0
    encodes: bool = False
    inputs_ticket: str = ""
    weight: int = 1


class AbortRequests(Message, frozen=True, tag=2):
    names: tuple[str, ...]
    reason: AbortReason


class ResetPrefixCache(Message, frozen=True, tag=3):
    """Has no answer of its own; the next EngineStats shows the effect."""


class Goodbye(Message, frozen=True, tag=4):
    """The client leaves; its live requests are aborted."""


class Ping(Message, frozen=True, tag=5):
    """Asks whether a silent engine core still runs; answered by Pong."""


class Operate(Message, frozen=True, tag=6):
    """Asks for an operation; answered by an Operated of this name."""

    name: str
    operation: AnyOperation


class Subscribe(Message, frozen=True, tag=7):
    """Asks for the engine's event stream, from a new snapshot on; answered by Events. `is_on` False: no more of it."""

    is_on: bool = True


ClientMessage = Operate | Hello | SubmitRequest | AbortRequests | ResetPrefixCache | Goodbye | Ping | Subscribe

# ---- engine core -> API process ----------------------------------------------------------------------------------


class TokenLogprobs(Message, frozen=True):
    """Log-probability of one sampled token, its rank (0 is the likeliest) and the best alternatives as (token, logprob)."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class EngineReady(Message, frozen=True, tag=10):
    """With `max_restarts` > 0 another engine core follows one that ends. `root_seed` keys requests without a seed
    (derived_seed). `blamed` names the request in which the engine core before this one ended, if that is known. It `replaces`
    one that its operator has ended, and may have another model. `inputs_ticket`: by which other engines get the vectors of inputs
    that this one has encoded, "" for one that encodes for nobody.
    """

    config: SchedulerConfig
    model: str
    world_size: int
    log_dir: str
    environment: dict[str, str] = {}
    model_digest: str = ""
    linear_layers: dict[str, tuple[int, int]] = {}
    max_restarts: int = 0
    root_seed: int = 0
    blamed: str = ""
    replaces: bool = False
    inputs_ticket: str = ""


class RequestRefused(Message, frozen=True, tag=11):
    """The client made a mistake: one sentence with the value and the remedy."""

    name: str
    message: str


class PromptResult(Message, frozen=True):
    """What request `id` wanted of its prompt, or a part of it: scores of the prompt's tokens from index `first` on, or an
    embedding. As bytes of n tokens with K alternatives each: `logprobs` float32 [n], `ranks` int32 [n] (0 is the likeliest),
    `top_tokens` int32 [n, K], `top_logprobs` float32 [n, K]. `hidden` float32 [hidden size]. Or, of tokens of the prompt or the
    answer, `experts` int16 [n, *experts_shape]: the experts that each went to, in the layers that have some."""

    id: int
    first: int = 0
    logprobs: bytes = b""
    ranks: bytes = b""
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    hidden: bytes = b""
    experts: bytes = b""
    experts_shape: tuple[int, int] = (0, 0)


class RequestOutput(Message, frozen=True):
    """What one commit gave one request. `finish` is "" while the request goes on, then "stop", "length" or "abort".

    `number` is the request's number in this engine; later `Outputs` refer to the request by it. -1 where it does not matter.
    `queue_seconds` is set in a request's first output: the time it waited for its first step. It is 0 in later outputs.
    `error` says why the engine aborted the request, where it did.
    `prompt` comes before the first token; parts come again, with the same bits, where a preempted request repeats them.
    `accepted_drafts` and `rejected_drafts` of the whole request come with its last output, and so does `retained`: how many of its
    tokens are pinned in the cache, and how many gave way; None for a request that wanted nothing to stay, or was aborted.
    The last output of a prompt that was handed over has the `ticket`, "" where that has failed. `missed` comes with the first.
    """

    name: str
    tokens: bytes
    finish: str = ""
    stop_token: int = -1
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    number: int = -1
    queue_seconds: float = 0.0
    error: str = ""
    prompt: tuple[PromptResult, ...] = ()
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    retained: tuple[int, int] | None = None
    ticket: str = ""
    missed: CacheMiss | None = None


class Outputs(Message, frozen=True, tag=12):
    """What one event gave the requests of one client. The usual output is one token and nothing else. Such outputs are entries
    of two columns: `numbers` (int64 bytes), each introduced by an earlier output, and `tokens` (int32 bytes), one entry per
    token. No request is in both the columns and the list."""

    outputs: tuple[RequestOutput, ...] = ()
    numbers: bytes = b""
    tokens: bytes = b""


class EngineStats(Message, frozen=True, tag=13):
    """Current gauges, and counters since start. Seconds are floats.

    `stalled` is a sentence while a step takes far longer than it should, `recovering` one while the ranks are started again, else
    "". `step_silent_seconds`: for how long the oldest step in flight has had no result. `step_tokens_max`: what a
    step may take now, fewer behind `shortages` of memory. `adapters`, `tier`, `pins`, `states`, `experts`:
    None without.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_held: int
    blocks_kept: int
    steps: int
    arrived: int
    finished: int
    aborted: int
    preempted: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    ring_stalls: int
    log_bytes: int
    step_seconds_sum: float
    plan_seconds_sum: float
    digest_checks: int
    log_frames_lost: int = 0
    ring_stall_seconds: float = 0.0
    stalled: str = ""
    step_silent_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    adapters: AdapterStats | None = None
    residence: Residence = Residence()
    recovering: str = ""
    recoveries: int = 0
    recovery_seconds: float = 0.0
    tier: TierStats | None = None
    pins: PinStats | None = None
    spoilt: int = 0
    lost: CacheLosses = CacheLosses()
    states: StateStats | None = None
    shortages: int = 0
    step_tokens_max: int = 0
    experts: ExpertStats | None = None


class EngineDied(Message, frozen=True, tag=14):
    """`refused`: the engine did not start because of its input (a setting, a model, a folder). `is_followed`: another engine core
    follows this one."""

    message: str
    refused: bool = False
    is_followed: bool = False


class Pong(Message, frozen=True, tag=15):
    """Answers Ping: the engine core runs."""


class Operated(Message, frozen=True, tag=16):
    """What became of an operation: its value as JSON, or one sentence that says why it was not carried out."""

    name: str
    error: str = ""
    value: bytes = b"null"


class Events(Message, frozen=True, tag=17):
    """The next whole records of the event stream (vnext/log/stream.py). Empty: it ended because this client did not read, and is to
    be asked for again."""

    data: bytes


EngineMessage = Operated | EngineReady | RequestRefused | Outputs | EngineStats | EngineDied | Pong | Events

# ---- rank -> engine core -----------------------------------------------------------------------------------------


class ModelFacts(Message, frozen=True):
    """What decisions need to know of a model: its vocabulary size, its longest context in tokens, the tokens that end an
    answer, the attention window of each group of layers (0: unlimited), whether steps compute whole prompts alone, whether prompts
    have inputs (state/store/inputs.py), whether all tokens of one are computed with any, as how many tokens a rank takes to encode
    a token of one, whether these lie in rows, and whether each prompt is a text that listens to one."""

    vocab_size: int
    position_count_max: int
    eos_token_ids: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    whole_prompts: bool = False
    reads_inputs: bool = False
    mutual_inputs: bool = False
    input_cost: float = 0.0
    grids: bool = False
    listens: bool = False


class DiskFound(Message, frozen=True):
    """What a rank has on disk: the names of its blocks, oldest first, and the bytes of a file, and the same of snapshots."""

    blocks: bytes
    file_bytes: int
    snapshots: bytes = b""
    snapshot_bytes: int = 0


class HandoverPlace(Message, frozen=True):
    """Where a rank puts blocks for other engines: the folder in shared memory, and the address that serves them, "" for none."""

    folder: str
    address: str = ""


class RankReady(Message, frozen=True, tag=20):
    """The weights are loaded; `page_count_max` blocks of `block_bytes` fit into this rank's memory budget.
    `draft_costs` are the row_cost, step_cost and row_cost_many of Speculation, 0 where they are not asked for. `linear_layers`:
    (inputs, outputs) of those that adapters may change, by their modules' names in the checkpoint; none without adapters.
    `disk`: None without a disk tier. `handover`: None without one. `state_bytes`: of a request's recurrent states, 0 for none.
    `keeps_inputs`: it looks for vectors of inputs in files."""

    model: ModelFacts
    rank: int
    page_count_max: int
    block_bytes: int
    model_digest: str
    environment: dict[str, str]
    draft_costs: tuple[int, int, int] = (0, 0, 0)
    linear_layers: dict[str, tuple[int, int]] = {}
    disk: DiskFound | None = None
    handover: HandoverPlace | None = None
    state_bytes: int = 0
    keeps_inputs: bool = False


class StepResult(Message, frozen=True, tag=21):
    """Rank 0's result carries tokens (int32 bytes, schedule order), logprobs (one entry per sampled row, None if not asked) and
    (request, why) of the samples whose constraint could not be followed.

    Every rank reports the digests of the state in which it executed the step: the structure, and the chain of committed
    tokens; 0 where none was due. When a digest is due, the result also carries the words of digest.DETAIL_NAMES and of
    digest.histories, which identify what has drifted, and those of fed.NAMES, which hash the inputs of the model. `fed` is ()
    on a rank that hashes no batch. `prompts`, of rank 0: what the step computed of prompts. `counts` and `drafted`, of rank 0,
    are those of StepCommitted, and `drafts` (int32 bytes) the drafts behind `fed`, where that is due. `short`: why this rank
    lacks the memory for the step, which then has no other result; "" where it has been computed. `gone`: the digest of an input
    that is not there any more, where the step lacks that. `experts`, of rank 0, where a
    digest is due: their load, None where it is not measured.
    """

    rank: int
    step: int
    digest: int
    token_digest: int
    seconds: float
    tokens: bytes = b""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    details: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()
    fed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    prompts: tuple[PromptResult, ...] = ()
    counts: bytes = b""
    drafted: bytes = b""
    drafts: bytes = b""
    short: str = ""
    gone: bytes = b""
    experts: ExpertStats | None = None

    @property
    def commit(self) -> StepCommitted:
        """The step's commit, from the result of rank 0."""
        return StepCommitted(self.step, self.tokens, self.counts, self.drafted)


class RankFailed(Message, frozen=True, tag=22):
    rank: int
    message: str


class AdapterRead(Message, frozen=True, tag=23):
    """A rank has read an adapter that it was asked to read; `error` is a sentence if it could not."""

    rank: int
    digest: str
    error: str = ""


class RankAnswer(Message, frozen=True, tag=24):
    """A rank's answer to a command: its value as JSON, or why it was not carried out."""

    rank: int
    serial: int
    error: str = ""
    value: bytes = b"null"


class BlocksWritten(Message, frozen=True, tag=25):
    """A rank has written those of the `blocks` that it was asked for which are `stored`, and those of the `snapshots` which are
    `snapshots_stored`; the others could not be."""

    rank: int
    blocks: bytes
    stored: bytes
    snapshots: bytes = b""
    snapshots_stored: bytes = b""


class BlocksRead(Message, frozen=True, tag=26):
    """A rank has read the first `count` blocks of a transfer, its snapshot counted as the last; `bad`: the name of the one behind
    them that is not as it was written, b"" if none. `checksums` (16 bytes each) of those from another engine."""

    rank: int
    transfer: int
    count: int
    bad: bytes = b""
    checksums: bytes = b""


class BlocksPublished(Message, frozen=True, tag=27):
    """A rank has put the first `count` blocks of a request where other engines find them."""

    rank: int
    id: int
    count: int


class InputsRead(Message, frozen=True, tag=28):
    """A rank has the vectors of the inputs at these `places` of a request."""

    rank: int
    id: int
    places: tuple[int, ...]


RankMessage = (
    BlocksWritten | BlocksRead | BlocksPublished | InputsRead | RankAnswer | RankReady | StepResult | RankFailed | AdapterRead
)

encoder = msgspec.msgpack.Encoder()


def derived_seed(root_seed: int, request_id: int) -> int:
    """The uint64 key of an unseeded request: unrelated between requests, the same in every run with one root."""
    data = root_seed.to_bytes(8, "little") + request_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
