"""Faults of vnext/sched: admission, preemption and the decision itself."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


ADMISSION = [
    bug(
        "an admission costs no budget", "sched.admission", "        budget -= tokens", "        budget -= 0", "S3", "IllegalEvent", "S1"
    ),
    bug(
        "one that does not fit hides all",
        "sched.admission",
        "        if isinstance(verdict, Wait):\n            break",
        "        if isinstance(verdict, Wait):\n            return ()",
        "S3",
        "S6",
    ),
    Bug(
        name="one that does not fit is overtaken",
        edits=(
            Edit("sched.admission", "if isinstance(verdict, Wait):\n            break", "if isinstance(verdict, Wait):\n            continue"),
            Edit("sched.admission", "yield place, wait\n", "yield place, wait\n            joins = None\n            continue\n"),
        ),
        found_by=("S3", "L2"),
    ),
    bug(
        "one that does not fit is admitted",
        "sched.admission",
        "if not fits(config, pool, hits, tokens):",
        "if False:",
        "IllegalEvent",
    ),
    bug(
        "blocks of running rows are thought free",
        "sched.admission",
        "pools.take(state.pool, work.pages_sum)",
        "pools.take(state.pool, 0)",
        "IllegalEvent",
    ),
    bug(
        "one request too many in the batch",
        "sched.admission",
        "room: int = state.config.max_num_seqs - state.rows.cells",
        "room: int = state.config.max_num_seqs + 1 - state.rows.cells",
        "IllegalEvent",
        "S1",
    ),
    bug(
        "one request too few in the batch",
        "sched.admission",
        "room: int = state.config.max_num_seqs - state.rows.cells",
        "room: int = state.config.max_num_seqs - 1 - state.rows.cells",
        "S3",
        "S6",
    ),
    bug(
        "a part of a prompt without chunked prefill",
        "sched.admission",
        "return rest if rest <= budget else 0",
        "return min(rest, budget)",
        "S1",
    ),
    bug(
        "a first chunk over the threshold",
        "sched.admission",
        "min(rest, config.long_prefill_token_threshold or rest, budget)",
        "min(rest, budget)",
        "S1",
        "S3",
    ),
    bug(
        "a chunk one token too small",
        "sched.admission",
        "if not config.chunked_prefill:\n        return rest",
        "budget -= budget > 1\n    if not config.chunked_prefill:\n        return rest",
        "S3",
        "S6",
    ),
    bug(
        "a hit one block too short",
        "sched.admission",
        "hits = prefix_hits(config, pool, waiting)",
        "hits = prefix_hits(config, pool, waiting)[: -config.group_count]",
        "S3",
        "S6",
        "IllegalEvent",
    ),
    bug(
        "a trial that claims nothing",
        "sched.admission",
        "pool = allocate(config, pool, *joins).pool",
        "pool = pool",
        "IllegalEvent",
        "S3",
    ),
    bug(
        "the head of the line is stuck",
        "sched.admission",
        "    for place, verdict in verdicts(state, places, work):",
        "    for place, verdict in verdicts(state, places[1:], work):",
        "S3",
    ),
    bug("admission stops after one", "sched.admission", "if budget == 0:", "if True:", "S3"),
    bug(
        "one that would just fit is kept out",
        "sched.admission",
        "lacks = blocks_for(known, size) - free",
        "lacks = blocks_for(known, size) - free + 1",
        "S3",
        "S6",
    ),
]

PREEMPTION = [
    bug(
        "a shared block is thought freed",
        "sched.preemption",
        "int((self.ref[blocks] == 0).sum())",
        "len(blocks)",
        "IllegalEvent",
    ),
    bug(
        "a victim's blocks stay held", "sched.preemption", "self.ref[blocks] -= 1", "self.ref[blocks] -= 0", "S4", "S6"
    ),
    bug(
        "a victim's budget is lost",
        "sched.preemption",
        "self.budget += int(self.tokens[row])",
        "self.budget += 0",
        "S6",
    ),
    bug(
        "a victim's new blocks are lost",
        "sched.preemption",
        "int((self.ref[blocks] == 0).sum()) + int(self.taken[row])",
        "int((self.ref[blocks] == 0).sum())",
        "S4",
        "S6",
    ),
    bug(
        "a row that lacks blocks costs no budget",
        "sched.preemption",
        "self.budget -= tokens",
        "self.budget -= 0",
        "S6",
        "IllegalEvent",
        "S1",
    ),
    bug(
        "rows under pressure ignore the threshold",
        "sched.preemption",
        "config.long_prefill_token_threshold or want, self.budget",
        "self.budget",
        "S1",
        "S6",
    ),
    bug(
        "rows under pressure take one token at a time",
        "sched.preemption",
        "tokens = max(min(want, config",
        "tokens = max(min(want, 1, config",
        "S6",
    ),
    bug(
        "victims give way from the best of the worst",
        "sched.preemption",
        "preempted=tuple(room.victims)",
        "preempted=tuple(room.victims[::-1])",
        "S4",
    ),
    bug(
        "a victim goes on running",
        "sched.preemption",
        "self.runs[row], self.tokens[row], self.taken[row] = False, 0, 0",
        "self.tokens[row], self.taken[row] = 0, 0",
        "S6",
    ),
    bug(
        "the best gives way",
        "sched.preemption",
        "row = self.best_first.pop()",
        "row = self.best_first.pop(0)",
        "S4",
        "L2",
    ),
    bug(
        "everybody behind the first gives way",
        "sched.preemption",
        "while need > self.free and self.runs[row]:",
        "while (need > self.free or (self.victims and len(self.best_first) > 1)) and self.runs[row]:",
        "S4",
    ),
    bug(
        "the victim's row is named wrongly",
        "sched.preemption",
        "self.victims.append(row)",
        "self.victims.append(row - 1)",
        "S4",
        "L2",
        "IllegalEvent",
    ),
]

DECISION = [
    bug(
        "a step too many in flight",
        "sched.admission",
        "else state.config.pipeline_depth",
        "else state.config.pipeline_depth + 1",
        "IllegalEvent",
    ),
    bug(
        "a pipeline that is never filled",
        "sched.admission",
        "else state.config.pipeline_depth",
        "else 1",
        "S6",
    ),
    bug(
        "nobody is admitted into an idle engine",
        "sched.schedule",
        "if work.tokens_sum == 0 and not admitted:",
        "if work.tokens_sum == 0:",
        "S6",
    ),
    bug(
        "priorities are turned round",
        "sched.ranking",
        "priorities = np.array([entry.priority",
        "priorities = np.array([-entry.priority",
        "S3",
    ),
    bug(
        "the latest arrival of a priority first",
        "sched.ranking",
        'np.argsort(priorities, kind="stable")[:count].tolist()',
        'np.argsort(priorities[::-1], kind="stable")[:count].tolist()',
        "S3",
    ),
    bug(
        "victims by arrival where priority rules",
        "sched.ranking",
        "np.lexsort((rows.id, rows.cells[fields.PRIORITY]))",
        "np.lexsort((rows.cells[fields.PRIORITY], rows.id))",
        "S4",
    ),
    bug("a scheduler that gives up under pressure", "sched.schedule", "return make_room(state)", "return None", "S6"),
    Bug(
        name="a request that gives way goes to the back of the line",
        found_by=("M5", "L2"),
        edits=(
            Edit(
                "state.waiting_queue",
                "len(queue) if not queue or queue[-1].id < entry.id else",
                "len(queue) if True else",
            ),
        ),
    ),
]

OWN_POLICIES = [
    bug(
        "all live requests of a tenant count as running",
        "sched.ranking",
        "tenant_running=running[request.root]",
        "tenant_running=live[request.root]",
        "S3",
        "S4",
    ),
    bug(
        "a tenant's share leaves out who waits",
        "sched.ranking",
        "Counter(state.requests[id_].root for id_ in progress)",
        "Counter(state.requests[id_].root for id_ in columns_read[0])",
        "S3",
    ),
    bug(
        "what waits counts as computed",
        "sched.ranking",
        "(entry.known, 0, entry.preemption_count, False)",
        "(entry.known, entry.known, entry.preemption_count, False)",
        "S3",
        "S4",
    ),
    bug(
        "an own policy without patience",
        "sched.ranking",
        "if candidate.preemptions >= PATIENCE else",
        "if candidate.preemptions > 999 else",
        "S3",
        "S4",
        "L1",
    ),
    bug(
        "the worst waiting request first",
        "sched.ranking",
        "key=lambda place: ranked[waiting[place].id])[:count]",
        "key=lambda place: ranked[waiting[place].id])[::-1][:count]",
        "S3",
    ),
    bug(
        "the best running request gives way",
        "sched.ranking",
        "sorted(range(len(rows)), key=lambda row: ranked[ids[row]])",
        "sorted(range(len(rows)), key=lambda row: ranked[ids[row]])[::-1]",
        "S4",
    ),
]

DEADLINE_BUGS = [
    bug("late requests go first", "sched.ranking", "begun | (due >= now_ns), IN_TIME, LATE", "begun | (due < now_ns), IN_TIME, LATE", "S3", "S4"),
    bug("who waited too long stays late", "sched.ranking", "np.where(hurries, BEFORE_ALL, first)", "first", "S3", "S4"),
    bug("who has begun is late", "sched.ranking", "begun | (due >= now_ns)", "due >= now_ns", "S3", "S4"),
    bug("a deadline is only an arrival", "sched.ranking", "due = arrived + allowed", "due = arrived", "S3", "S4"),
]  # fmt: skip

SCHED_BUGS = [*ADMISSION, *PREEMPTION, *DECISION, *OWN_POLICIES]
