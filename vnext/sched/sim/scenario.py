"""Scenarios: what happens to an engine, all of it drawn from one seed.

Small pools, tiny vocabularies and shared beginnings make sharing, eviction and preemption happen every few steps. Each
class of faults is switched on or off for a whole scenario, so that every mixture is met. How likely anything is, is
decided here and nowhere else.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.sched.sim.chance import Chance
from vnext.sched.sim.house import POLICIES
from vnext.sched.sim.setting import NEVER, Client, Faults, Scenario, capacity
from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling

LARGE_RUNNING_MAX = 20
CROWD = 4
"""So many times more requests where the batch has room for more than LARGE_RUNNING_MAX."""
VOCAB_SIZE = 7
END_TOKEN = 0
DUELLING = tuple(name for name in POLICIES if name.endswith((":least_computed", ":scattered")))
SALTS = (("",), ("",), ("", "a"), ("", "a", "b", "c"))
WINDOWS = ((1,), (2,), (4,), (7,), (16,), (0, 4), (0, 4), (3, 0), (5, 5), (0, 0), (0, 5, 5), (7, 0, 3), (0, 1, 99))
BLOCK_COUNT_MAX = 600
PRIORITIES = ((0,), (0, 1, 2), (0, 1, 2), (-(2**31), -1, 0, 2**31 - 1))


def scenario(seed: int, client_count: int = 60) -> Scenario:
    """The scenario of one seed."""
    chance = Chance(seed)
    config = draw_config(chance.fork())
    if chance.happens(5):
        config = as_duel(chance.fork(), config)
    clients = draw_clients(chance.fork(), config, client_count * (CROWD if config.running_max > LARGE_RUNNING_MAX else 1))
    end_us = max((client.arrival_us for client in clients), default=0)
    resets = chance.choose((0, 0, 0, 0, *(chance.between(1, 12) for _ in range(3)), 60))
    return Scenario(
        seed=seed,
        config=config,
        clients=clients,
        reset_us=tuple(chance.below(end_us + 1) for _ in range(resets)),
        rank_count=chance.choose((1, 1, 1, 1, 1, 1, 2, 2, 2, 3)),
        faults=draw_faults(chance.fork(), config),
        shutdown_us=chance.below(end_us + 1) if chance.happens(5) else NEVER,
    )


def draw_config(chance: Chance) -> SchedulerConfig:
    chunked, blocks, rows = chance.happens(75), (1, 16), (1, 8)
    if chance.happens(15):
        blocks, rows = (2, 64), (8, LARGE_RUNNING_MAX)
    elif chance.happens(1):
        blocks, rows = (100, 600), (LARGE_RUNNING_MAX + 1, 150)
    few_tokens = chunked and chance.happens(30)
    config = SchedulerConfig(
        block_size=chance.choose((1, 2, 3, 4, 4, 5, 16)),
        block_count=chance.between(*blocks),
        batch_tokens_max=chance.between(1, 8) if few_tokens else chance.between(8, 40 if chunked else 16) + rows[1] - 8,
        running_max=chance.between(*rows),
        model_len_max=200 if rows[1] == 8 and chance.happens(2) else chance.choose((8, 24, 60)),
        prefill_threshold=chance.choose((0, 0, 1, 3)) if chunked else 0,
        prefix_caching=chance.happens(80),
        chunked_prefill=chunked,
        pipeline_depth=chance.choose((1, 2, 2, 3, 4, chance.between(5, 8))),
        policy=chance.choose(("fcfs", "fcfs", "priority", chance.choose(POLICIES))),
        eos_token_ids=chance.choose(((), (END_TOKEN,), (END_TOKEN,), (END_TOKEN, 4))),
        vocab_size=VOCAB_SIZE if chance.happens(80) else chance.choose((300, 70_000, 70_000)),
    )
    return with_windows(chance, config) if chance.happens(30) else config


def with_windows(chance: Chance, config: SchedulerConfig) -> SchedulerConfig:
    """Layers in one to three groups, some with windows of a token, of less than a block, of a few blocks, of whole requests."""
    windows = chance.choose(WINDOWS)
    if chance.happens(40):
        windows = tuple(0 if chance.happens(30) else chance.between(1, 3 * config.block_size) for _ in windows)
    return replace(config, windows=windows, block_count=min(config.block_count * len(windows), BLOCK_COUNT_MAX))


def as_duel(chance: Chance, config: SchedulerConfig) -> SchedulerConfig:
    """Few requests that each need the whole cache grow side by side and throw each other out, token by token."""
    return replace(
        config, policy=chance.choose(DUELLING), chunked_prefill=True, prefill_threshold=1, running_max=chance.between(2, 4),
        block_size=chance.choose((1, 2)), block_count=chance.between(3, 8), model_len_max=60,
        batch_tokens_max=max(config.batch_tokens_max, 4), windows=(),
    )  # fmt: skip


def draw_faults(chance: Chance, config: SchedulerConfig) -> Faults:
    def class_of(percent: int, on: int = 40) -> int:
        return chance.between(1, percent) if chance.happens(on) else 0

    logged = chance.happens(60 if config.vocab_size > VOCAB_SIZE else 15)  # logs pack large tokens otherwise
    return Faults(
        duplicate_result=class_of(40),
        late_result=class_of(40),
        lost_result=class_of(20),
        slow_step=class_of(30),
        slow_rank=class_of(80),
        crash=class_of(1, 80 if logged else 40),
        logged=logged,
        hesitation=class_of(50),
        illegal=class_of(30, 50),
        # Nobody is out of order where first come is first served, and no prompt is cut where prompts stay whole.
        whim=class_of(40, 30) if config.policy != "fcfs" and config.chunked_prefill else 0,
        clock_jump_us=10**9 if chance.happens(40) else 0,
    )


def draw_clients(chance: Chance, config: SchedulerConfig, count: int) -> tuple[Client, ...]:
    """Bursts and gaps; conversations that continue; requests at the very size of the pool."""
    gap_us = chance.choose((0, 30, 300))
    aborts_percent = chance.choose((0, 0, 10, 50))
    salts, priorities = chance.choose(SALTS[2:] if config.policy in POLICIES else SALTS), chance.choose(PRIORITIES)
    clock_us = chance.choose((1, 500))  # many clients leave at once where the clock is coarse
    own_salts = chance.happens(5)
    now_us, clients, histories = 0, [], [(1,)]
    for number in range(count):
        now_us += chance.below(2 * gap_us + 1) if chance.happens(60) else 0
        prompt = draw_prompt(chance, config, histories)
        if prompt:
            histories.append(prompt)
        clients.append(
            Client(
                arrival_us=now_us,
                prompt=prompt,
                sampling=draw_sampling(chance, config, len(prompt)),
                priority=chance.choose(priorities),
                cache_salt=str(number) if own_salts else chance.choose(salts),
                abort_us=(now_us + chance.below(3000)) // clock_us * clock_us if chance.happens(aborts_percent) else NEVER,
            )
        )
    return tuple(clients)


def draw_prompt(chance: Chance, config: SchedulerConfig, histories: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A beginning of an earlier prompt and a few new tokens; now and then as long as the whole cache, or one off."""
    kind, size = chance.below(100), config.block_size
    if kind < 6:  # about the pool's size, to the token and to the block
        length = max(config.block_count * size + chance.between(-1, 1) * chance.choose((1, size)), 1)
        return tuple(1 + place % 3 for place in range(min(length, config.model_len_max)))
    if kind == 6:  # no engine serves this
        return (1,) * chance.choose((0, config.model_len_max, 3 * config.model_len_max))
    if config.policy in DUELLING and config.prefill_threshold == 1 and kind < 60:  # a request alone fills the cache
        return tuple(chance.between(1, 3) for _ in range(max(capacity(config) - chance.between(1, 4), 1)))
    earlier = chance.choose(histories)
    fresh = [chance.between(1, 3) for _ in range(chance.below(9))]
    prompt = (*earlier[: chance.between(1, len(earlier))], *fresh)
    if kind < 20:  # at a block's edge, or one off
        prompt = prompt[: max(len(prompt) // size * size + chance.between(-1, 1), 1)]
    return prompt[: max(capacity(config) - 1, 1)]


def draw_sampling(chance: Chance, config: SchedulerConfig, prompt_length: int) -> Sampling:
    """Mostly what can be served; the rest is refused at arrival."""
    room, size, kind = max(capacity(config) - prompt_length, 1), config.block_size, chance.below(100)
    if kind < 3:
        wanted = chance.choose((0, room + 1, chance.between(1, config.model_len_max)))
    elif kind < 18:
        wanted = 1
    elif kind < 30:  # its last token at a block's edge, or one off
        wanted = min(max(-(prompt_length % -size) + size * chance.below(3) + chance.between(-1, 1), 1), room)
    else:
        wanted = chance.between(1, room)
    return Sampling(
        seed=chance.below(5),
        max_tokens=wanted,
        min_tokens=chance.choose((0, 0, 0, 1, 4, wanted, chance.between(0, wanted))),
        stop_token_ids=chance.choose(((), (), (5,), (END_TOKEN, 6))),
        ignore_eos=chance.happens(30),
    )
