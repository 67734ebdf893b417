"""Messages between processes that are not events: API <-> engine core, ranks -> engine core.

Owns their types and their one codec (msgpack, typed, tagged). Nothing here is pickled; an unknown tag or a wrong type
is refused by the decoder. Token ids are little-endian int32 bytes as in `vnext.state.events`.
"""

from __future__ import annotations

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.events import AbortReason
from vnext.state.params import Sampling


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all messages."""


# ---- API process -> engine core ----------------------------------------------------------------------------------


class Hello(Message, tag=0):
    """The first word of a client; answered by EngineReady."""


class SubmitRequest(Message, tag=1):
    """`name` is unique among the client's live requests. Not `has_seed`: the engine core draws the seed."""

    name: str
    prompt: bytes
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    has_seed: bool = True


class AbortRequests(Message, tag=2):
    names: tuple[str, ...]
    reason: AbortReason


class ResetPrefixCache(Message, tag=3):
    """Answered by nothing; seen in the next EngineStats."""


class Goodbye(Message, tag=4):
    """The client leaves; its live requests are aborted."""


ClientMessage = Hello | SubmitRequest | AbortRequests | ResetPrefixCache | Goodbye

# ---- engine core -> API process ----------------------------------------------------------------------------------


class TokenLogprobs(Message):
    """Log-probability of one sampled token, its rank (0 is the likeliest) and the best alternatives (token, logprob)."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class EngineReady(Message, tag=10):
    config: SchedulerConfig
    model: str
    world_size: int
    log_dir: str
    environment: dict[str, str] = {}


class RequestRefused(Message, tag=11):
    """A client's mistake: one sentence with the value and the remedy."""

    name: str
    message: str


class RequestOutput(Message):
    """What one commit gave one request. `finish` is "" while it goes on, else "stop", "length" or "abort"."""

    name: str
    tokens: bytes
    finish: str = ""
    stop_token: int = -1
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Outputs(Message, tag=12):
    outputs: tuple[RequestOutput, ...]


class EngineStats(Message, tag=13):
    """Gauges now and counters since start. Seconds are floats."""

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


class EngineDied(Message, tag=14):
    """`refused`: it did not start, because of what it was given."""

    message: str
    refused: bool = False


EngineMessage = EngineReady | RequestRefused | Outputs | EngineStats | EngineDied

# ---- rank -> engine core -----------------------------------------------------------------------------------------


class ModelFacts(Message):
    """What decisions need of a model: its vocabulary, the longest context in tokens, the tokens that end an answer, and
    how far each group of its layers sees (0: everything)."""

    vocab_size: int
    position_count_max: int
    eos_token_ids: tuple[int, ...]
    windows: tuple[int, ...] = (0,)


class RankReady(Message, tag=20):
    """The weights are loaded; `block_count_max` blocks of `block_bytes` fit into this rank's memory budget."""

    model: ModelFacts
    rank: int
    block_count_max: int
    block_bytes: int
    model_digest: str
    environment: dict[str, str]


class StepResult(Message, tag=21):
    """Rank 0 carries tokens (int32 bytes, schedule order) and logprobs (one entry per sampled row, None if not asked).

    Every rank carries its digests of the state in which the step was executed (structure, and the chain of committed
    tokens), 0 where none was due, and then also the words of digest.DETAIL_NAMES and of digest.histories, to name what has
    drifted.
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


class RankFailed(Message, tag=22):
    rank: int
    message: str


RankMessage = RankReady | StepResult | RankFailed

encoder = msgspec.msgpack.Encoder()
client_decoder = msgspec.msgpack.Decoder(ClientMessage)
engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
rank_decoder = msgspec.msgpack.Decoder(RankMessage)
