"""Scenarios: what happens to an engine, all of it drawn from one seed.

Small pools, tiny vocabularies and shared beginnings make sharing, eviction and preemption happen every few steps. Each
class of faults is switched on or off for a whole scenario, so that every mixture is met. How likely anything is, is
decided here, and of disks in tier.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from tests.sim.scenario import NEVER, Client, Faults, Scenario, capacity, pictured, weighed
from tests.sim.tier import as_kept, draw_disk, returning
from vnext.sched.policies import STEADY
from vnext.sim.rng import Rng
from vnext.sim.sample_policies import POLICIES
from vnext.sim.toy import BREAKS
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.events import Pause
from vnext.state.params import ENGINE_DRAFTS, LAST, MEAN, NO_LOGPROBS, NO_POOLING, Constraint, Sampling

LARGE_MAX_NUM_SEQS = 20
CROWD = 4
"""So many times more requests where the batch has room for more than LARGE_MAX_NUM_SEQS."""
VOCAB_SIZE = 7
END_TOKEN = 0
DUELLING = tuple(name for name in POLICIES if name.endswith((":least_computed", ":scattered")))
SALTS = (("",), ("",), ("", "a"), ("", "a", "b", "c"))
WINDOWS = ((1,), (2,), (4,), (7,), (16,), (0, 4), (0, 4), (3, 0), (5, 5), (0, 0), (0, 5, 5), (7, 0, 3), (0, 1, 99))
PAGE_COUNT_MAX = 600
SCORED_SEEDS = 8
"""In one of so many scenarios every third request is scored and every third embedded; nothing is drawn for it."""
DRAFTING_SEEDS = 8
"""One in so many scenarios speculates; nothing is drawn for it."""
ADAPTED_SEEDS = 16
"""In one of so many scenarios requests have adapters, which share one to three slots; nothing is drawn for it."""
ADAPTERS = ("", "a", "b", "a", "c", "d")
WEIGHTS_SEEDS = 9
"""In one of so many scenarios the weights change, at times drawn from a seed of their own."""
CONSTRAINED_SEEDS = 3
"""In one of so many scenarios, if answers can end, two of three requests have constraints, drawn from a seed of their own."""
DYING_SEEDS = 5
"""In one of so many scenarios ranks and engine core die, drawn from a seed of their own."""
DISK_SEEDS = 11
"""One in so many scenarios, if its engine can have one, has a disk tier, drawn from a seed of its own."""
RETAINING_SEEDS = 7
"""In one of so many scenarios requests want their beginnings kept, drawn from a seed of its own."""
STAGED_SEEDS = 13
"""In one of so many scenarios requests decode in microbatches, drawn from a seed of its own."""
RECURRENT_SEEDS = 17
"""In two of so many scenarios, if nothing else speaks against it, the model has recurrent layers, drawn from a seed of its own."""
PICTURED_SEEDS = 6
"""In one of so many scenarios prompts hold inputs; nothing is drawn for it."""
SEARCHING_PICTURED = 3
"""In one of so many scenarios with inputs, ranks look for their vectors in files."""
SECONDS_US = (1, 3, 20, 100)
PEER_SEEDS = 31
"""One in so many scenarios has such a disk, and blocks come from other engines and go to them; nothing is drawn for it."""
PEER_PERCENT = 60
WEIGHED_SEEDS = 3
"""In one of so many scenarios requests have weights; nothing is drawn for it."""
SHORT_SEEDS = 6
"""In one of so many scenarios memory runs short, drawn from a seed of its own."""
PRIORITIES = ((0,), (0, 1, 2), (0, 1, 2), (-(2**31), -1, 0, 2**31 - 1))


def scenario(seed: int, client_count: int = 60) -> Scenario:
    """The scenario of one seed."""
    rng = Rng(seed)
    config = draw_config(rng.fork())
    kind = rng.below(100)
    if kind < 5:
        config = as_duel(rng.fork(), config)
    elif kind < 10:
        config = as_squeeze(rng.fork(), config)
    if speculates(seed):
        config = replace(config, speculation=speculation_of(seed // DRAFTING_SEEDS))
        config = at_little_cost(config, drafts_by_grammar(seed)) if constrains(seed) else config
    config = as_kept(Rng(seed + 2**60), config) if has_disk(seed) else config
    config = as_pinned(Rng(seed + 2**57), config) if retains(seed) else config
    config = as_staged(Rng(seed + 2**54), config) if has_microbatches(seed) else config
    config = as_recurrent(Rng(seed + 2**53), config, has_disk(seed)) if has_states(seed) else config
    clients = draw_clients(rng.fork(), config, client_count * (CROWD if config.max_num_seqs > LARGE_MAX_NUM_SEQS else 1))
    if has_pictures(seed):
        config = replace(as_encoding(Rng(seed + 2**51), config), grids=seed // PICTURED_SEEDS % 3 == 0)
        clients = pictured(clients, config.grids)
    clients = with_own_bounds(clients) if speculates(seed) else clients
    clients = returning(Rng(seed + 2**58), clients) if has_disk(seed) else clients
    clients = retaining(Rng(seed + 2**56), clients) if retains(seed) else clients
    clients = scored(clients) if seed % SCORED_SEEDS == SCORED_SEEDS - 1 else clients
    if seed % ADAPTED_SEEDS == ADAPTED_SEEDS - 4:
        config, clients = replace(config, max_loras=1 + seed // ADAPTED_SEEDS % 3), adapted(clients)
    if constrains(seed) and config.eos_token_ids:
        clients = constrained(Rng(~seed % 2**64), config, clients)
        clients = forcing(Rng(seed + 2**62), clients) if drafts_by_grammar(seed) else clients
        clients = interrupted(Rng(seed + 2**63), config, clients) if is_interrupted(seed) else clients
    clients = weighed(clients) if seed % WEIGHED_SEEDS == 1 else clients
    end_us = max((client.arrival_us for client in clients), default=0)
    resets = rng.choose((0, 0, 0, 0, *(rng.between(1, 12) for _ in range(3)), 60))
    return Scenario(
        seed=seed,
        config=config,
        clients=clients,
        reset_us=tuple(rng.below(end_us + 1) for _ in range(resets)),
        rank_count=rng.choose((1, 1, 1, 1, 1, 1, 2, 2, 2, 3)),
        faults=with_shortages(Rng(seed + 2**52), with_deaths(Rng(seed + 2**61), draw_faults(rng.fork(), config), seed), seed),
        shutdown_us=rng.below(end_us + 1) if rng.happens(5) else NEVER,
        weights=draw_weights(Rng(seed + 2**61), end_us) if changes_weights(seed) else (),
        disk=replace(draw_disk(Rng(seed + 2**60)), peers=PEER_PERCENT * has_peers(seed)) if has_disk(seed) else None,
        searches=searches(seed),
        second_us=SECONDS_US[seed // RETAINING_SEEDS % len(SECONDS_US)] if retains(seed) else 0,
    )


def draw_weights(rng: Rng, end_us: int) -> tuple[tuple[int, Pause], ...]:
    """One to six changes of the weights; "sleep" stands for a sleep in mode "keep" before the change."""
    modes: tuple[Pause, ...] = ("wait", "keep", "abort", "sleep")
    return tuple((rng.below(end_us + 1), rng.choose(modes)) for _ in range(rng.between(1, 6)))


def has_pictures(seed: int) -> bool:
    """Whether prompts of this seed's scenario hold inputs, whose tokens no model scores."""
    return seed % PICTURED_SEEDS == PICTURED_SEEDS - 1 and seed % SCORED_SEEDS != SCORED_SEEDS - 1


def searches(seed: int) -> bool:
    """Whether ranks look for vectors of the inputs in files; nothing is drawn for it."""
    return has_pictures(seed) and seed // PICTURED_SEEDS % SEARCHING_PICTURED == 1


def as_encoding(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """With one input a step, whole or in units, a few or any number."""
    config = replace(config, inputs_a_step=rng.choose((0, 1, 1, 2, 3)) if config.chunked_prefill else 0)
    if config.inputs_a_step != 1:
        return config
    return replace(config, input_units=rng.choose((0, 1, 400, 512, 1100)), input_tokens=rng.choose((0, 0, 1, 2, 5)))


def has_disk(seed: int) -> bool:
    """Whether the engine of this seed's scenario has a disk tier, if it can have one."""
    return seed % DISK_SEEDS == 6 or has_peers(seed)


def has_peers(seed: int) -> bool:
    """Whether this seed's engine also has blocks of other engines."""
    return seed % PEER_SEEDS == 20


def retains(seed: int) -> bool:
    """Whether requests of this seed's scenario want their beginnings kept."""
    return seed % RETAINING_SEEDS == 3


def as_pinned(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """With pins for few pages, for most of them, and now and then for none."""
    return replace(config, prefix_caching=True, pinned_kv_fraction=rng.choose((0.0, 0.1, 0.3, 0.3, 0.5, 0.9, 0.9)))


def retaining(rng: Rng, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, most of which want one or two beginnings kept, for times of all lengths."""
    found = []
    for client in clients:
        count = rng.choose((0, 1, 1, 1, 2))
        kept = [(rng.choose((rng.below(len(client.prompt) + 4), 10**6)), rng.choose((1, 5, 60, 300, 3600))) for _ in range(count)]
        found.append(replace(client, sampling=replace(client.sampling, retention=tuple(kept))))
    return tuple(found)


def has_microbatches(seed: int) -> bool:
    """Whether requests of this seed's scenario decode in microbatches."""
    return seed % STAGED_SEEDS == 11


def as_staged(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """With two to four microbatches, as many steps in flight or more, and mostly with room for several requests."""
    count, pages = rng.choose((2, 2, 2, 3, 4)), max(config.page_count, rng.choose((0, 24, 64)))
    rows = max(config.max_num_seqs, count + rng.below(8))
    depth = count + rng.choose((0, 0, 0, 1, 3))
    return replace(config, microbatches=count, pipeline_depth=depth, max_num_seqs=rows, page_count=pages)


def has_states(seed: int) -> bool:
    """Whether the model of this seed's scenario has recurrent layers."""
    return seed % RECURRENT_SEEDS in (10, 11) and not has_microbatches(seed)


def as_recurrent(rng: Rng, config: SchedulerConfig, on_disk: bool = False) -> SchedulerConfig:
    """With state pages for one request or for many, snapshots at many edges, at few or, but with a disk, at none, and mostly a cache."""
    interval = config.block_size * rng.choose((0, 1, 2, 2, 3, 5))
    caching = config.prefix_caching or rng.happens(80)
    count = 4 + rng.choose((0, 0, 1, 3, 8, 3 * config.max_num_seqs, 4 * config.max_num_seqs))
    interval = max(interval, config.block_size) if on_disk else interval
    return replace(config, chunked_prefill=True, prefix_caching=caching, state_pages=count, snapshot_interval=interval)


def changes_weights(seed: int) -> bool:
    """Whether the weights change in this seed's scenario."""
    return seed % WEIGHTS_SEEDS == WEIGHTS_SEEDS - 4


def constrains(seed: int) -> bool:
    """Whether requests of this seed's scenario have constraints, if its answers can end."""
    return seed % CONSTRAINED_SEEDS == 2


def is_interrupted(seed: int) -> bool:
    """Whether constraints of this seed's scenario fail, and answers are stopped."""
    return constrains(seed) and seed // CONSTRAINED_SEEDS % 2 == 0


def drafts_by_grammar(seed: int) -> bool:
    """Whether the engine of this seed's scenario drafts what grammars force, and nothing else."""
    return speculates(seed) and constrains(seed) and seed // (CONSTRAINED_SEEDS * DRAFTING_SEEDS) % 3 > 0


def speculates(seed: int) -> bool:
    """Whether the engine of this seed's scenario speculates."""
    return seed % DRAFTING_SEEDS == DRAFTING_SEEDS - 4


def speculation_of(number: int) -> Speculation:
    """Few drafts and many, at no cost and at all costs."""
    drafts, costs, step_costs = (1, 2, 3, 4, 5, 6, 7, 20), (0, 0, 30, 400, 1000), (0, 500, 3000)
    return Speculation(
        num_speculative_tokens=drafts[number % 8], row_cost=costs[number // 8 % 5], step_cost=step_costs[number % 3],
        row_cost_many=(0, 900, 60)[number // 3 % 3],
    )  # fmt: skip


def at_little_cost(config: SchedulerConfig, by_grammar: bool) -> SchedulerConfig:
    """With as many drafts as a step has room for: most answers are short."""
    assert config.speculation is not None
    row_cost, method = min(config.speculation.row_cost, 30), "grammar" if by_grammar else "ngram"
    speculation = replace(config.speculation, row_cost=row_cost, step_cost=0, method=method)
    return replace(config, speculation=speculation, long_prefill_token_threshold=0)


def draw_config(rng: Rng) -> SchedulerConfig:
    chunked, blocks, rows = rng.happens(75), (1, 16), (1, 8)
    if rng.happens(15):
        blocks, rows = (2, 64), (8, LARGE_MAX_NUM_SEQS)
    elif rng.happens(1):
        blocks, rows = (100, 600), (LARGE_MAX_NUM_SEQS + 1, 150)
    few_tokens = chunked and rng.happens(30)
    config = SchedulerConfig(
        block_size=rng.choose((1, 2, 3, 4, 4, 5, 16)),
        page_count=rng.between(*blocks),
        max_num_batched_tokens=rng.between(1, 8) if few_tokens else rng.between(8, 40 if chunked else 16) + rows[1] - 8,
        max_num_seqs=rng.between(*rows),
        max_model_len=200 if rows[1] == 8 and rng.happens(2) else rng.choose((8, 24, 60)),
        long_prefill_token_threshold=rng.choose((0, 0, 1, 3)) if chunked else 0,
        prefix_caching=rng.happens(80),
        chunked_prefill=chunked,
        pipeline_depth=rng.choose((1, 2, 2, 3, 4, rng.between(5, 8))),
        policy=rng.choose(("fcfs", "fcfs", "priority", rng.choose(POLICIES))),
        eos_token_ids=rng.choose(((), (END_TOKEN,), (END_TOKEN,), (END_TOKEN, 4))),
        vocab_size=VOCAB_SIZE if rng.happens(80) else rng.choose((300, 70_000, 70_000)),
    )
    if config.policy.endswith(":fair_share") and config.page_count % 2:
        config = replace(config, policy="fair", counts_alone=config.page_count % 4 == 1)
    if config.policy.endswith(":crowd_last") and config.page_count % 2:
        config = replace(config, policy="deadline:1")
    return with_windows(rng, config) if rng.happens(30) else config


def with_windows(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """Layers in one to three groups, some with windows of a token, of less than a block, of a few blocks, of whole
    requests."""
    windows = rng.choose(WINDOWS)
    if rng.happens(40):
        windows = tuple(0 if rng.happens(30) else rng.between(1, 3 * config.block_size) for _ in windows)
    return replace(config, windows=windows, page_count=min(config.page_count * len(windows), PAGE_COUNT_MAX))


def as_duel(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """Few requests that each need the whole cache grow side by side and throw each other out, token by token."""
    return replace(
        config, policy=rng.choose(DUELLING), chunked_prefill=True, windows=(), long_prefill_token_threshold=1,
        max_num_seqs=rng.between(2, 4), block_size=rng.choose((1, 2)), page_count=rng.between(3, 8), max_model_len=60,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 4),
    )  # fmt: skip


def as_squeeze(rng: Rng, config: SchedulerConfig) -> SchedulerConfig:
    """Blocks and budget run out in the same step, and the worst row may have been served already: what it had goes to
    others."""
    return replace(
        config,
        policy="priority" if config.policy == "fcfs" else config.policy,
        chunked_prefill=True,
        windows=(),
        long_prefill_token_threshold=rng.between(2, 3),
        max_num_batched_tokens=rng.between(4, 8),
        max_num_seqs=rng.between(4, 8),
        block_size=rng.choose((1, 2)),
        page_count=rng.between(8, 24),
        max_model_len=24,
    )


def draw_faults(rng: Rng, config: SchedulerConfig) -> Faults:
    def class_of(percent: int, on: int = 40) -> int:
        return rng.between(1, percent) if rng.happens(on) else 0

    logged = rng.happens(60 if config.vocab_size > VOCAB_SIZE else 15)  # logs pack large tokens otherwise
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
        clock_jump_us=10**9 if rng.happens(40) else 0,
    )


def dies(seed: int) -> bool:
    """Whether ranks or the engine core die in this seed's scenario."""
    return seed % DYING_SEEDS == 3


def with_deaths(rng: Rng, faults: Faults, seed: int) -> Faults:
    """The same faults and, of some seeds, deaths: now and then, or one upon the other until there were enough."""
    if not dies(seed):
        return faults
    ranks, core = rng.choose(((1, 0), (0, 1), (1, 1), (30, 0), (0, 30), (20, 20)))
    return replace(faults, ranks_die=ranks, core_dies=core, deaths=rng.between(1, 24))


def lacks_memory(seed: int) -> bool:
    """Whether memory runs short in this seed's scenario."""
    return seed % SHORT_SEEDS == 2


def with_shortages(rng: Rng, faults: Faults, seed: int) -> Faults:
    """The same faults and, of some seeds, steps that lack memory: one now and then, or several in a row."""
    if not lacks_memory(seed):
        return faults
    return replace(faults, short=rng.choose((1, 5, 30, 90)), shortages=rng.between(1, 24))


def draw_clients(rng: Rng, config: SchedulerConfig, count: int) -> tuple[Client, ...]:
    """Bursts and gaps; conversations that continue; requests at the very size of the pool."""
    gap_us = rng.choose((0, 30, 300))
    aborts_percent = rng.choose((0, 0, 10, 50))
    salts, priorities = rng.choose(SALTS[2:] if config.policy not in STEADY else SALTS), rng.choose(PRIORITIES)
    clock_us = rng.choose((1, 500))  # many clients leave at once where the clock is coarse
    own_salts = rng.happens(5)
    now_us, clients = 0, []
    histories: list[tuple[int, ...]] = [(1,)]
    for number in range(count):
        now_us += rng.below(2 * gap_us + 1) if rng.happens(60) else 0
        prompt = draw_prompt(rng, config, histories)
        if prompt:
            histories.append(prompt)
        clients.append(
            Client(
                arrival_us=now_us,
                prompt=prompt,
                sampling=draw_sampling(rng, config, len(prompt)),
                priority=rng.choose(priorities),
                cache_salt=str(number) if own_salts else rng.choose(salts),
                abort_us=(now_us + rng.below(3000)) // clock_us * clock_us if rng.happens(aborts_percent) else NEVER,
            )
        )
    return tuple(clients)


def scored(clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, most of which want something of their prompts."""
    wishes = ((0, NO_POOLING), (NO_LOGPROBS, MEAN), (NO_LOGPROBS, LAST))
    return tuple(
        replace(client, sampling=replace(client.sampling, prompt_logprobs=prompt_logprobs, pooling=pooling))
        for place, client in enumerate(clients)
        for prompt_logprobs, pooling in (wishes[place % len(wishes)],)
    )


def with_own_bounds(clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, two of five of which bound their drafts."""
    bounds = (ENGINE_DRAFTS, 0, ENGINE_DRAFTS, ENGINE_DRAFTS, 2)
    return tuple(
        replace(client, sampling=replace(client.sampling, num_speculative_tokens=bounds[place % len(bounds)]))
        for place, client in enumerate(clients)
    )


def adapted(clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, most of which have an adapter."""
    return tuple(
        replace(client, sampling=replace(client.sampling, adapter=ADAPTERS[(place + place // 7) % len(ADAPTERS)]))
        for place, client in enumerate(clients)
    )


def constrained(rng: Rng, config: SchedulerConfig, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, most of which constrain their answers. Those end where their constraints end them."""
    tokens = [token for token in range(VOCAB_SIZE) if token not in config.eos_token_ids]
    free = {"min_tokens": 0, "ignore_eos": False}
    return tuple(
        replace(client, sampling=replace(client.sampling, constraint=draw_constraint(rng, tokens), **free))
        if rng.happens(67)
        else client
        for client in clients
    )


def forcing(rng: Rng, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests; most sets of their grammars have one token, which is forced then."""
    found = []
    for client in clients:
        constraint = client.sampling.constraint
        if constraint is not None and constraint.grammar:
            sets = [each.partition(",")[0].rstrip("*") if rng.happens(75) else each for each in constraint.grammar.split()]
            sampling = replace(client.sampling, constraint=replace(constraint, grammar=" ".join(sets)))
            client = replace(client, sampling=sampling)
        found.append(client)
    return tuple(found)


def interrupted(rng: Rng, config: SchedulerConfig, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """The same requests, a quarter of whose grammars fail somewhere, and a third of which are stopped by a text of one or two
    tokens."""
    tokens = [token for token in range(VOCAB_SIZE) if token not in config.eos_token_ids]
    found = []
    for client in clients:
        constraint = client.sampling.constraint
        if constraint is not None and constraint.grammar and rng.happens(25):
            sets = constraint.grammar.split()
            place = rng.below(len(sets))
            sets[place] = f"{BREAKS},{sets[place]}"
            sampling = replace(client.sampling, constraint=replace(constraint, grammar=" ".join(sets)))
            client = replace(client, sampling=sampling)
        if constraint is not None and rng.happens(33):
            client = replace(client, stop=tuple(rng.choose(tokens) for _ in range(rng.between(1, 2))))
        found.append(client)
    return tuple(found)


def draw_constraint(rng: Rng, tokens: list[int]) -> Constraint:
    """Over these tokens; lists and grammar may leave no token."""

    def some(most: int, kinds: int = VOCAB_SIZE) -> tuple[int, ...]:
        return tuple(rng.choose(tokens[:kinds]) for _ in range(rng.between(1, most)))

    sets = [",".join(map(str, some(3))) + ("*" if rng.happens(30) else "") for _ in range(rng.between(1, 12))]
    found = Constraint(
        grammar=" ".join(sets) if rng.happens(75) else "",
        reasoning_end=some(3) if rng.happens(40) else (),
        reasoning_max=rng.choose((-1, 0, 1, 2, 5)),
        allowed=some(6) if rng.happens(15) else (),
        banned=tuple(some(3, 2) for _ in range(rng.between(1, 2))) if rng.happens(25) else (),
    )
    end, mixed = found.reasoning_end, sum(found.reasoning_end)
    if mixed % 5 == 0 and not found.grammar:
        first = VOCAB_SIZE // 2
        found = replace(found, times=(first, first + 1), not_first=(first,) if found.reasoning_max == 0 else ())
    return replace(found, reasoning_begin=(end[-1], *end[: mixed % 3])) if mixed % 2 else found


def draw_prompt(rng: Rng, config: SchedulerConfig, histories: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A beginning of an earlier prompt and a few new tokens; now and then as long as the whole cache, or one off."""
    kind, size = rng.below(100), config.block_size
    if kind < 6:  # about the pool's size, to the token and to the block
        length = max(config.page_count * size + rng.between(-1, 1) * rng.choose((1, size)), 1)
        return tuple(1 + place % 3 for place in range(min(length, config.max_model_len)))
    if kind == 6:  # no engine serves this
        return (1,) * rng.choose((0, config.max_model_len, 3 * config.max_model_len))
    if (
        config.policy in DUELLING and config.long_prefill_token_threshold == 1 and kind < 60
    ):  # a request alone fills the cache
        return tuple(rng.between(1, 3) for _ in range(max(capacity(config) - rng.between(1, 4), 1)))
    earlier = rng.choose(histories)
    fresh = [rng.between(1, 3) for _ in range(rng.below(9))]
    prompt = (*earlier[: rng.between(1, len(earlier))], *fresh)
    if kind < 20:  # at a block's edge, or one off
        prompt = prompt[: max(len(prompt) // size * size + rng.between(-1, 1), 1)]
    return prompt[: max(capacity(config) - 1, 1)]


def draw_sampling(rng: Rng, config: SchedulerConfig, prompt_length: int) -> Sampling:
    """Mostly what can be served; the rest is refused at arrival."""
    room, size, kind = max(capacity(config) - prompt_length, 1), config.block_size, rng.below(100)
    if kind < 3:
        wanted = rng.choose((0, room + 1, rng.between(1, config.max_model_len)))
    elif kind < 18:
        wanted = 1
    elif kind < 30:  # its last token at a block's edge, or one off
        wanted = min(max(-(prompt_length % -size) + size * rng.below(3) + rng.between(-1, 1), 1), room)
    else:
        wanted = rng.between(1, room)
    return Sampling(
        seed=rng.below(5),
        max_tokens=wanted,
        min_tokens=rng.choose((0, 0, 0, 1, 4, wanted, rng.between(0, wanted))),
        stop_token_ids=rng.choose(((), (), (5,), (END_TOKEN, 6))),
        ignore_eos=rng.happens(30),
    )
