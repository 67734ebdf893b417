"""Faults around recoveries: what survives the memory of ranks, what a request loses or brings, and caution that is none."""

from __future__ import annotations

from planting import Bug, Edit

PREEMPTED = "state = tier.without_transfers(preempt(state, tuple(range(len(state.rows)))))"
ENDED = "p for p, e in enumerate(state.waiting) if e.known > state.requests[e.id].prompt_length"
SHORTER = f"gone = {{{ENDED}}}; less = [replace(state.waiting[p], tokens=state.waiting[p].tokens[:-4]) for p in gone]"
LOST = "replace(state, in_flight=(), committed=state.planned)"
AGAIN = "[state := enqueue(state, replace(entry, preemption_count=max(entry.preemption_count - 1, 0))) for entry in old]"
SAME_EPOCH = f"old = [*state.waiting]; state = dequeue(state, set(range(len(old)))); {AGAIN}"
POOL, SLOTS = "pools.new_pool(state.config.page_count, state.pool.pins, state.config.state_pages)", "slots=(None,) * state.config.max_loras"

CRASH_BUGS = [
    Bug(
        name="the request of a client that has left goes on in another engine",
        edits=(Edit("tests.sim.streams", "if is_over or number in self.left:", "if is_over:"),),
        found_by=("C5",),
    ),
    # the client has left, and the engine died before it had said so: crash stories alone come upon it soon
]
RECOVERY_BUGS = [
    Bug(
        name="a recovered request loses its last token",
        edits=(
            Edit(
                "state.reduce",
                PREEMPTED,
                f"{PREEMPTED}; {SHORTER}; state = dequeue(state, gone); [state := enqueue(state, entry) for entry in less]",
            ),
        ),
        found_by=("C2", "A2"),
    ),
    Bug(
        name="who runs is as it was behind a recovery",
        edits=(Edit("state.reduce", PREEMPTED, "state = tier.without_transfers(state)"),),
        found_by=("M2",),
    ),
    Bug(
        name="the youngest request is lost with the ranks",
        edits=(Edit("state.reduce", f"state = {LOST}", f"state = finish({LOST}, [len(state.rows) - 1][: len(state.rows)], 'aborted')"),),
        found_by=("C2", "A2"),
    ),
    Bug(
        name="a request waits twice behind a recovery",
        edits=(Edit("state.reduce", PREEMPTED, f"{PREEMPTED}; [state := enqueue(state, entry) for entry in state.waiting[-1:]]"),),
        found_by=("M5",),
    ),
    Bug(
        name="a recovered request has the epoch of steps that are lost",
        edits=(Edit("state.reduce", PREEMPTED, f"{PREEMPTED}; {SAME_EPOCH}"),),
        found_by=("C2", "A2"),
    ),
    Bug(
        name="kept pages survive a recovery",
        edits=(Edit("state.reduce", f"pool={POOL},\n        {SLOTS},\n        cau", f"pool=state.pool,\n        {SLOTS},\n        cau"),),
        found_by=("C1",),
    ),
    Bug(
        name="a step in flight survives a recovery",
        edits=(Edit("state.reduce", f"state = {LOST}", "state = replace(state)"),),
        found_by=("C1",),
    ),
    Bug(
        name="the numbers of lost steps are used again",
        edits=(Edit("state.reduce", "in_flight=(), committed=state.planned)", "in_flight=(), planned=state.committed)"),),
        found_by=("C1",),
    ),
    Bug(
        name="a slot survives a recovery",
        edits=(Edit("state.reduce", f"{SLOTS},\n        cautious=", "slots=state.slots,\n        cautious="),),
        found_by=("C1",),
    ),
    Bug(
        name="a cautious state admits two",
        edits=(Edit("sched.admission", "else min(room, 1)", "else min(room, 2)"),),
        found_by=("C3",),
    ),
    Bug(
        name="a cautious state admits beside a prompt",
        edits=(Edit("sched.admission", "return 0 if (wants(state.rows) > 1).any() else min(room, 1)", "return min(room, 1)"),),
        found_by=("C3",),
    ),
    Bug(
        name="a cautious state never admits beside others",
        edits=(Edit("sched.admission", "(wants(state.rows) > 1).any()", "len(state.rows)"),),
        found_by=("S3",),
    ),
    Bug(
        name="a cautious state plans ahead",
        edits=(Edit("sched.admission", "return 1 if state.cautious else", "return"),),
        found_by=("C3",),
    ),
    Bug(
        name="a steady turn knows no caution",
        edits=(Edit("sched.turn", "or state.cautious", "or False"),),
        found_by=("a turn goes on",),
    ),
    Bug(
        name="nobody is cautious behind a recovery",
        edits=(Edit("state.reduce", "cautious=event.cautious,", "cautious=0,"),),
        found_by=("C3",),
    ),
    Bug(
        name="caution ends with the first step",
        edits=(Edit("state.fold_plan", "return state if waits else", "return"),),
        found_by=("C3",),
    ),
    Bug(
        name="caution ends before all have come",
        edits=(Edit("state.fold_plan", "state.next_id < state.cautious or any(", "any("),),
        found_by=("C3",),
    ),
    Bug(
        name="caution lasts for ever",
        edits=(Edit("state.fold_plan", "return state if waits else", "return state if True else"),),
        found_by=("C3",),
    ),
    Bug(
        name="a resumed request counts its generated tokens as prompt",
        edits=(Edit("state.reduce", "        prompt=event.prompt,", "        prompt=event.prompt + generated_by(event),"),),
        found_by=("C4",),
    ),
    Bug(
        name="a resumed request begins anew",
        edits=(Edit("state.reduce", "request, request.prompt + generated_by(event)))", "request, request.prompt))"),),
        found_by=("C4",),
    ),
    Bug(
        name="a resumed request has the blocks of its prompt alone",
        edits=(Edit("state.waiting_queue", "block_hashes(root, tokens,", "block_hashes(root, tokens if preemptions else request.prompt,"),),
        found_by=("C4",),
    ),
    Bug(
        name="a request that has ended is resumed",
        edits=(Edit("state.feasibility", "(why_not := _has_ended(config, arrival.sampling, generated))", "(why_not := None)"),),
        found_by=("should have been refused",),
    ),
    Bug(
        name="an engine goes on behind any log at any time",
        edits=(Edit("state.reduce", "require(not event.log or state.sequence == 1,", "require(True,"),),
        found_by=("should have been refused",),
    ),
    Bug(
        name="new ranks are less cautious than the engine core",
        edits=(Edit("log.snapshot", "cautious=frame.cautious", "cautious=0"),),
        found_by=("X2", "Y1"),
    ),
]
