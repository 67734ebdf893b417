"""Faults at the edges of vnext/state: events that may not happen, and the log as bytes."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(f"state.{module}", old, new),), found_by=found_by)


REFUSALS = [
    bug("any number may arrive", "reduce", "require(event.id == state.next_id,", "require(event.id >= 0,", "should have been refused"),
    bug("strangers may be aborted", "reduce", "        after(status, Change.ABORT)\n", "        status\n", "should have been refused"),
    bug("an empty prompt is served", "refusal", "if prompt == 0 or len(arrival.prompt) % 4:", "if len(arrival.prompt) % 4:",
        "L1", "should have been refused", "Error"),
    bug("half a token is served", "refusal", "if prompt == 0 or len(arrival.prompt) % 4:", "if prompt == 0:",
        "should have been refused", "Error"),
    bug("an answer of no tokens", "refusal", "if wanted < 1:", "if wanted < 0:", "L1", "should have been refused"),
    bug("any step may be planned", "planning", "if event.step != state.planned:", "if event.step < state.planned:",
        "should have been refused"),
    bug("a plan beyond the pipeline", "planning", "if len(state.flights) >= state.config.pipeline_depth:",
        "if len(state.flights) > state.config.pipeline_depth:", "A3", "should have been refused"),
    bug("a row gives way twice", "planning", 'require(len(set(preempted)) == len(preempted), "a row preempted twice in one plan")', "pass",
        "should have been refused", "M1", "M2", "M5", "Error"),
    bug("a row takes more than it wants", "planning", "require(0 <= count <= wanted[row],", "require(0 <= count,",
        "should have been refused", "S2", "Error"),
    bug("a row takes less than nothing", "planning", "require(0 <= count <= wanted[row],", "require(count <= wanted[row],",
        "should have been refused", "S1", "Error"),
    bug("a step of nothing", "planning", "if not 0 < total <=", "if not 0 <= total <=", "should have been refused", "S1"),
    bug("a request admitted twice", "planning", 'require(len(set(places)) == len(places), "a request admitted twice in one plan")', "pass",
        "should have been refused", "M5"),
    bug("a batch without bound", "planning", "require(len(admitted) <= room,", "require(True,", "should have been refused", "S1"),
    bug("a first step of no tokens", "planning", "require(1 <= tokens <= waiting.known - start,",
        "require(tokens <= waiting.known - start,", "should have been refused", "S1"),
    bug("a result of a step that is not due", "committing", "if event.step != state.flights[0].step:", "if False:", "should have been refused"),
    bug("a result of half a token", "committing", "if len(event.tokens) % 4:", "if len(event.tokens) % 4 > 1:", "Error"),
    bug("a result of more tokens than were asked for", "committing", "require(len(sampled) == len(asked),",
        "require(len(sampled) >= len(asked),", "should have been refused", "Error"),
]  # fmt: skip

LOG = [
    bug("a torn record is damage", "log_read", "if end == 0 or _is_zero(", "if _is_zero(", "X2"),
    bug("a log's last frame is overlooked", "log_read", "while (offset := reading.offset) < size:",
        "while (offset := reading.offset) < size - 60:", "X2"),
    Bug(name="a token cut off in the log", found_by=("X2",), edits=(
        Edit("state.log_pack", "((token_bound - 1).bit_length() + 7) // 8", "(token_bound - 1).bit_length() // 8"),
        Edit("state.log_plain", "if any(tokens[place::4].count(0) != count for place in range(width, WIDTH_MAX)):", "if False:"),
    )),
    bug("a token's third byte is lost", "log_plain", "wide[place::4] = packed[place::width]",
        "wide[place::4] = packed[place % 2 :: width]", "X2", "did not sample", "history changed", "Illegal"),
    bug("a reset that is not written", "log_pack", "packed = tuple(_packed(event, width) for event in events)",
        "packed = tuple(_packed(event, width) for event in events if len(type(event).__name__) < 16)", "X2"),
]  # fmt: skip

KEYFRAMES = [
    bug("a keyframe forgets in which epoch a request waits", "keyframe", "(entry.epoch, entry.cached)", "(0, entry.cached)", "X2"),
    bug("a keyframe forgets a first hit", "keyframe", "(entry.epoch, entry.cached)", "(entry.epoch, -1)", "X2"),
    bug("a keyframe forgets the order of free blocks", "keyframe", "queue[pool.status.at(free) - pool.head] = free",
        "queue[np.sort(pool.status.at(free)) - pool.head] = np.sort(free)", "X2", "Illegal"),
    bug("a keyframe forgets the tokens' digest", "keyframe", "token_digest=state.token_digest,", "token_digest=0,", "X2"),
    bug("a loaded queue begins elsewhere", "keyframe", "head=frame.head,\n        free=len(valid),", "head=0,\n        free=len(valid),",
        "X2", "Error", "BadKeyframe"),
]  # fmt: skip

EDGE_BUGS = [*REFUSALS, *LOG, *KEYFRAMES]
