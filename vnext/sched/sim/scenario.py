"""Scenarios: what happens to an engine, all of it drawn from one seed.

Small pools, tiny vocabularies and shared beginnings make sharing, eviction and preemption happen every few steps. Each
class of faults is switched on or off for a whole scenario, so that every mixture is met.
"""

from __future__ import annotations

import msgspec

from vnext.sched.sim.chance import Chance
from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling

VOCAB_SIZE = 7
END_TOKEN = 0
NEVER = -1


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities in percent, 0 where the class is off; `clock_jump_us` bounds how far a clock reading is wrong."""

    duplicate_result: int = 0
    late_result: int = 0
    lost_result: int = 0
    slow_step: int = 0
    slow_rank: int = 0
    crash: int = 0
    hesitation: int = 0
    clock_jump_us: int = 0


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client's request: it comes at `arrival_us` of virtual time and leaves at `abort_us` (NEVER if it stays)."""

    arrival_us: int
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int
    cache_salt: str
    abort_us: int = NEVER


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation needs; `reset_us` are the times of prefix cache resets."""

    seed: int
    config: SchedulerConfig
    clients: tuple[Client, ...]
    reset_us: tuple[int, ...]
    rank_count: int
    faults: Faults


def scenario(seed: int, client_count: int = 60) -> Scenario:
    """The scenario of one seed."""
    chance = Chance(seed)
    config = draw_config(chance.fork())
    clients = draw_clients(chance.fork(), config, client_count)
    end_us = max((client.arrival_us for client in clients), default=0)
    resets = chance.between(1, 12) if chance.happens(40) else 0
    return Scenario(
        seed=seed,
        config=config,
        clients=clients,
        reset_us=tuple(chance.below(end_us + 1) for _ in range(resets)),
        rank_count=chance.choose((1, 1, 1, 1, 2, 3)),
        faults=draw_faults(chance.fork()),
    )


def draw_config(chance: Chance) -> SchedulerConfig:
    chunked = chance.happens(75)
    return SchedulerConfig(
        block_size=chance.choose((1, 2, 3, 4, 16)),
        block_count=chance.between(2, 64) if chance.happens(20) else chance.between(2, 16),
        batch_tokens_max=chance.between(1, 8) if chunked and chance.happens(30) else chance.between(8, 40 if chunked else 16),
        running_max=chance.between(1, 8),
        model_len_max=chance.choose((8, 24, 60)),
        prefill_threshold=chance.choose((0, 0, 1, 3)) if chunked else 0,
        prefix_caching=chance.happens(80),
        chunked_prefill=chunked,
        pipeline_depth=chance.between(1, 4),
        policy=chance.choose(("fcfs", "priority")),
        eos_token_ids=(END_TOKEN,) if chance.happens(70) else (),
        vocab_size=VOCAB_SIZE,
    )


def draw_faults(chance: Chance) -> Faults:
    def class_of(percent: int) -> int:
        return chance.between(1, percent) if chance.happens(40) else 0

    return Faults(
        duplicate_result=class_of(40),
        late_result=class_of(40),
        lost_result=class_of(20),
        slow_step=class_of(30),
        slow_rank=class_of(80),
        crash=class_of(1),
        hesitation=class_of(50),
        clock_jump_us=10**9 if chance.happens(40) else 0,
    )


def draw_clients(chance: Chance, config: SchedulerConfig, count: int) -> tuple[Client, ...]:
    """Bursts and gaps; conversations that continue; requests at the very size of the pool."""
    gap_us = chance.choose((0, 30, 300))
    aborts_percent = chance.choose((0, 0, 10, 50))
    salts = chance.choose((("",), ("", "a")))
    clock_us = chance.choose((1, 500))  # many clients leave at once where the clock is coarse
    now_us, clients, histories = 0, [], [(1,)]
    for _ in range(count):
        now_us += chance.below(2 * gap_us + 1) if chance.happens(60) else 0
        prompt = draw_prompt(chance, config, histories)
        histories.append(prompt)
        clients.append(
            Client(
                arrival_us=now_us,
                prompt=prompt,
                sampling=draw_sampling(chance, config, len(prompt)),
                priority=chance.below(3),
                cache_salt=chance.choose(salts),
                abort_us=(now_us + chance.below(3000)) // clock_us * clock_us if chance.happens(aborts_percent) else NEVER,
            )
        )
    return tuple(clients)


def draw_prompt(chance: Chance, config: SchedulerConfig, histories: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A beginning of an earlier prompt and a few new tokens; now and then as long as the whole cache, or one off."""
    if chance.happens(5):
        length = max(config.block_count * config.block_size + chance.between(-1, 1), 1)
        return tuple(1 + place % 3 for place in range(min(length, config.model_len_max)))
    earlier = chance.choose(histories)
    fresh = [chance.between(1, 3) for _ in range(chance.below(9))]
    return (*earlier[: chance.between(1, len(earlier))], *fresh)[: max(capacity(config) - 1, 1)]


def draw_sampling(chance: Chance, config: SchedulerConfig, prompt_length: int) -> Sampling:
    """Mostly what can be served; the rest is refused at arrival."""
    room = config.model_len_max if chance.happens(3) else max(capacity(config) - prompt_length, 1)
    return Sampling(
        seed=chance.below(5),
        max_tokens=1 if chance.happens(15) else chance.between(1, room),
        min_tokens=chance.choose((0, 0, 0, 1, 4)),
        stop_token_ids=chance.choose(((), (), (5,), (END_TOKEN, 6))),
        ignore_eos=chance.happens(30),
    )


def capacity(config: SchedulerConfig) -> int:
    """Tokens that a request may reach: its last one is never computed and needs no place in the cache or a step."""
    most = min(config.model_len_max, config.block_count * config.block_size + 1)
    return most if config.chunked_prefill else min(most, config.batch_tokens_max + 1)
