"""Faults at the edges of vnext/state: events that may not happen, and the log as bytes."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


REFUSALS = [
    bug(
        "any number may arrive",
        "state.reduce",
        "if event.id != state.next_id:",
        "if event.id < 0:",
        "should have been refused",
    ),
    bug(
        "strangers may be aborted",
        "state.reduce",
        "    require(Status.UNKNOWN not in statuses.values(), ",
        "    require(True, ",
        "should have been refused",
    ),
    bug(
        "an empty prompt is served",
        "state.feasibility",
        "if prompt == 0 or len(arrival.prompt) % 4:",
        "if len(arrival.prompt) % 4:",
        "L1",
    ),
    bug(
        "half a token is served",
        "state.feasibility",
        "if prompt == 0 or len(arrival.prompt) % 4:",
        "if prompt == 0:",
        "should have been refused",
    ),
    bug(
        "an answer of no tokens",
        "state.feasibility",
        "if wanted < 1:",
        "if wanted < 0:",
        "L1",
        "should have been refused",
    ),
    bug(
        "any step may be planned",
        "state.fold_plan",
        "if event.step != state.planned:",
        "if event.step < state.planned:",
        "should have been refused",
    ),
    bug(
        "a plan beyond the pipeline",
        "state.fold_plan",
        "if len(state.in_flight) >= state.config.pipeline_depth:",
        "if len(state.in_flight) > state.config.pipeline_depth:",
        "A3",
        "should have been refused",
    ),
    bug(
        "a row gives way twice",
        "state.preempt",
        'require(len(set(preempted)) == len(preempted), "a row preempted twice in one plan")',
        "pass",
        "should have been refused",
    ),
    bug(
        "a row takes more than it wants",
        "state.fold_plan",
        "require(0 <= count <= most[row],",
        "require(0 <= count,",
        "should have been refused",
    ),
    bug(
        "a row takes less than nothing",
        "state.fold_plan",
        "require(0 <= count <= most[row],",
        "require(count <= most[row],",
        "should have been refused",
    ),
    bug(
        "a step of nothing",
        "state.fold_plan",
        "if not 0 < total <=",
        "if not 0 <= total <=",
        "should have been refused",
        "S1",
    ),
    bug(
        "a request admitted twice",
        "state.fold_plan",
        'if len(set(places)) < len(places):',
        "if False:",
        "should have been refused",
        "M5",
    ),
    bug(
        "a batch without bound",
        "state.fold_plan",
        "if len(admitted) > (room := state.config.max_num_seqs - len(state.rows)):",
        "if (room := 0):",
        "should have been refused",
        "S1",
    ),
    bug(
        "a first step of no tokens",
        "state.fold_plan",
        "if not 1 <= tokens <= waiting.known - start:",
        "if not tokens <= waiting.known - start:",
        "should have been refused",
        "S1",
    ),
    bug(
        "a result of a step that is not due",
        "state.fold_commit",
        "if event.step != state.in_flight[0].step:",
        "if False:",
        "should have been refused",
    ),
    bug(
        "a result of half a token",
        "state.fold_commit",
        "if len(event.tokens) % 4:",
        "if len(event.tokens) % 4 > 1:",
        "ValueError",
    ),
    bug(
        "a result of more tokens than were asked for",
        "state.fold_commit",
        "require(len(sampled) == len(asked),",
        "require(len(sampled) >= len(asked),",
        "should have been refused",
    ),
]

LOG = [
    bug("a torn record is damage", "log.reading", "if end == 0 or _is_zero(", "if _is_zero(", "X2"),
    bug("a log's last frame is overlooked", "log.reading", "while (offset := reading.offset) < size:",
        "while (offset := reading.offset) < size - 60:", "X2"),
    Bug(name="a token cut off in the log", found_by=("X2",), edits=(
        Edit("log.codec", "((token_bound - 1).bit_length() + 7) // 8", "(token_bound - 1).bit_length() // 8"),
        Edit("log.log_plain", "if any(tokens[place::4].count(0) != count for place in range(width, WIDTH_MAX)):", "if False:"),
    )),
    bug("a token's third byte is lost", "log.log_plain", "wide[place::4] = packed[place::width]",
        "wide[place::4] = packed[place % 2 :: width]", "X2", "did not sample", "history changed", "IllegalEvent"),
    bug("a reset that is not written", "log.codec", "        packed.append(narrow)",
        "        packed += [narrow] * (len(type(event).__name__) < 16)", "X2"),
]  # fmt: skip

SNAPSHOTS = [
    bug(
        "a snapshot forgets in which epoch a request waits",
        "log.snapshot",
        "(entry.preemption_count, entry.cached)",
        "(0, entry.cached)",
        "X2",
    ),
    bug(
        "a snapshot forgets a first hit",
        "log.snapshot",
        "(entry.preemption_count, entry.cached)",
        "(entry.preemption_count, -1)",
        "X2",
    ),
    bug(
        "a snapshot forgets the order of free blocks",
        "log.stored_pages",
        "queue[pool.status.at(free) - pool.head] = free",
        "queue[np.sort(pool.status.at(free)) - pool.head] = np.sort(free)",
        "X2",
        "IllegalEvent",
    ),
    bug(
        "a snapshot forgets the tokens' digest",
        "log.snapshot",
        "token_digest=state.token_digest,",
        "token_digest=0,",
        "X2",
    ),
    bug(
        "a loaded queue begins elsewhere",
        "log.stored_pages",
        "head=frame.head,\n        free=len(valid),",
        "head=0,\n        free=len(valid),",
        "BadSnapshot",
    ),
]

EDGE_BUGS = [*REFUSALS, *LOG, *SNAPSHOTS]
