"""Settings: the values that a simulation is made of. scenario.py draws them from a seed; tests make their own."""

from __future__ import annotations

from functools import cache
from zlib import crc32

import msgspec
from msgspec.structs import replace

from vnext.state.config import SchedulerConfig
from vnext.state.events import Pause
from vnext.state.params import Sampling
from vnext.state.store.fields import DIGEST_WORDS
from vnext.state.store.inputs import DIGEST_SIZE, ROWS_SIZE, input_tokens, with_rows

NEVER = -1
WEIGHTS = (1, 3, 100, 7)


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities in percent, 0 where the class is off; `clock_jump_us` bounds how far a clock reading is wrong.

    Of the transport: `duplicate_result`, `late_result`, `lost_result`, `slow_step`. Of ranks: `slow_rank`, `crash`;
    with `logged` a rank that crashed comes back from the bytes of a log whose tail is torn. Of the engine core:
    `hesitation` leaves it idle, `illegal` is an event that may not happen and must be refused, `whim` a plan that nobody
    would have decided and that may happen. After any event all ranks may die (`ranks_die`) or the engine core with them
    (`core_dies`), `deaths` times at most; `crash` is a rank that comes back by itself. A step may lack memory (`short`), so that no
    rank computes it, `shortages` times at most.
    """

    duplicate_result: int = 0
    late_result: int = 0
    lost_result: int = 0
    slow_step: int = 0
    slow_rank: int = 0
    crash: int = 0
    logged: bool = False
    hesitation: int = 0
    illegal: int = 0
    whim: int = 0
    clock_jump_us: int = 0
    ranks_die: int = 0
    core_dies: int = 0
    deaths: int = 0
    short: int = 0
    shortages: int = 0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A disk tier of `capacity` blocks. Percent of blocks that it loses (`fails`) or damages (`lies`), and of transfers that never
    answer (`hangs`); others take up to `slow_us`. Of `peers` percent of the requests another engine has computed the prompt, and
    the prompts of as many are computed for another one."""

    capacity: int
    fails: int = 0
    lies: int = 0
    hangs: int = 0
    slow_us: int = 100
    peers: int = 0


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client's request: it comes at `arrival_us` of virtual time and leaves at `abort_us` (NEVER if it stays), or soon after
    its answer has had the tokens of `stop`, as a server does that finds a stop string."""

    arrival_us: int
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int
    cache_salt: str
    abort_us: int = NEVER
    stop: tuple[int, ...] = ()
    weight: int = 1

    @property
    def number(self) -> int:
        """The number of the one who sends it: as many send requests as there are salts."""
        return crc32(self.cache_salt.encode())


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation needs; `reset_us` are the times of prefix cache resets, at `shutdown_us` (NEVER if
    nobody does) everything that lives is aborted at once. `weights` are the times at which other weights come, each with the pause
    in which they change. `disk`: None without a disk tier. `second_us` of virtual time are a second of the event clock, 0
    where nothing needs one. `searches`: ranks look for vectors of inputs in files."""

    seed: int
    config: SchedulerConfig
    clients: tuple[Client, ...]
    reset_us: tuple[int, ...]
    rank_count: int
    faults: Faults
    shutdown_us: int = NEVER
    weights: tuple[tuple[int, Pause], ...] = ()
    disk: Disk | None = None
    second_us: int = 0
    searches: bool = False


def weighed(clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests: the first third without weights, then with those of who sends them, then with others."""
    thirds = [3 * place // len(clients) for place in range(len(clients))]
    weights = [WEIGHTS[(each.number + third) % len(WEIGHTS)] if third else 1 for each, third in zip(clients, thirds)]
    return tuple(replace(each, weight=weight) for each, weight in zip(clients, weights))


def capacity(config: SchedulerConfig) -> int:
    """Tokens that a request may reach: its last one is never computed and needs no place in the cache or a step."""
    most = min(config.max_model_len, _longest(config) + 1)
    return most if config.chunked_prefill else min(most, config.max_num_batched_tokens + 1)


@cache
def _longest(config: SchedulerConfig) -> int:
    """Tokens that the cache holds of a request alone, however its steps are cut."""
    if not config.windows:
        return config.page_count * config.block_size
    longest = 0
    while longest < config.max_model_len and _pages_at_most(config, longest + 1) <= config.page_count:
        longest += 1
    return longest


def _pages_at_most(config: SchedulerConfig, length: int) -> int:
    """Pages at once, tried for a first position that a step sees at every place of a block."""
    size, pages = config.block_size, 0
    chunk = min(length, config.long_prefill_token_threshold or length, config.max_num_batched_tokens)
    for window in config.windows:
        seen = window - 1 + chunk if window else length
        spans = [(first + seen - 1) // size + 1 for first in range(size)]
        pages += min(max(spans), -(-length // size))
    return pages


def servable(config: SchedulerConfig, client: Client) -> bool:
    """Whether a request could be served by an engine that has nothing else to do."""
    length, wanted = len(client.prompt), client.sampling.max_tokens
    return length > 0 and wanted > 0 and length + wanted <= capacity(config)


def pictured(clients: tuple[Client, ...], grids: bool) -> tuple[Client, ...]:
    """The same requests with an input of 4 to 6 tokens, in one or two rows with `grids`, wherever a prompt has a 3 and room. Digests
    differ in their last bits only, and equal beginnings stay equal."""
    return tuple(replace(client, prompt=with_pictures(client.prompt, grids)) for client in clients)


def with_pictures(prompt: tuple[int, ...], grids: bool = False) -> tuple[int, ...]:
    """The prompt with its inputs."""
    found, at = list(prompt), 0
    while at < len(prompt) - 5:
        length = DIGEST_WORDS + prompt[at + 1] % 3
        if prompt[at] == 3 and at + length <= len(prompt):
            digest = prompt[at + 2].to_bytes(DIGEST_SIZE, "big")
            digest = with_rows(digest[ROWS_SIZE:] + digest[:ROWS_SIZE], 2 - length % 2) if grids else digest
            found[at : at + length] = input_tokens(digest, length).tolist()
            at += length - 1
        at += 1
    return tuple(found)
