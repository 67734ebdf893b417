"""Faults of vnext/sched: admission, preemption and the decision itself."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(f"sched.{module}", old, new),), found_by=found_by)


ADMISSION = [
    bug("an admission costs no budget", "admission", "budget -= tokens", "budget -= 0", "Illegal", "S1"),
    bug("one that does not fit hides all", "admission", "not fits(config, pool, hits, tokens):\n            break",
        "not fits(config, pool, hits, tokens):\n            return ()", "S3", "S6"),
    bug("one that does not fit is overtaken", "admission", "not fits(config, pool, hits, tokens):\n            break",
        "not fits(config, pool, hits, tokens):\n            continue", "S3", "L2"),
    bug("one that does not fit is admitted", "admission", "if tokens == 0 or not fits(config, pool, hits, tokens):", "if tokens == 0:",
        "Illegal", "Error"),
    bug("blocks of running rows are thought free", "admission", "pools.take(state.pool, running_pages)", "pools.take(state.pool, 0)", "Illegal"),
    bug("one request too many in the batch", "admission", "room = config.running_max - len(state.rows)",
        "room = config.running_max + 1 - len(state.rows)", "Illegal", "S1"),
    bug("one request too few in the batch", "admission", "room = config.running_max - len(state.rows)",
        "room = config.running_max - 1 - len(state.rows)", "S3", "S6"),
    bug("a part of a prompt without chunked prefill", "admission", "return rest if rest <= budget else 0", "return min(rest, budget)", "S1"),
    bug("a first chunk over the threshold", "admission", "min(rest, config.prefill_threshold or rest, budget)", "min(rest, budget)", "S1", "S3"),
    bug("a chunk one token too small", "admission", "if not config.chunked_prefill:\n        return rest",
        "budget -= budget > 1\n    if not config.chunked_prefill:\n        return rest", "S3", "S6"),
    bug("a trial that claims nothing", "admission", "pool = claim(config, pool, waiting, hits, tokens).pool", "pool = pool", "Illegal", "S3"),
    bug("the head of the line is stuck", "admission", "    for place in places:", "    for place in places[1:]:", "S3", "S6", "L2", "Error"),
    bug("admission stops after one", "admission", "if budget == 0 or place == places[-1]:", "if True:", "S3"),
    bug("one that would just fit is kept out", "admission", "lacks = blocks_for(known, size) - free",
        "lacks = blocks_for(known, size) - free + 1", "S3", "S6"),
]  # fmt: skip

PREEMPTION = [
    bug("a shared block is thought freed", "preemption", "int((self.ref[blocks] == 0).sum())", "len(blocks)", "Illegal"),
    bug("a victim's blocks stay held", "preemption", "self.ref[blocks] -= 1", "self.ref[blocks] -= 0", "S4", "S6"),
    bug("a victim goes on running", "preemption", "self.runs[row], self.tokens[row], self.taken[row] = False, 0, 0",
        "self.tokens[row], self.taken[row] = 0, 0", "Illegal", "Error", "S4", "S2"),
    bug("the best gives way", "preemption", "row = self.best_first.pop()", "row = self.best_first.pop(0)", "S4", "L2"),
    bug("everybody behind the first gives way", "preemption", "while need > self.free and self.runs[row]:",
        "while (need > self.free or (self.victims and len(self.best_first) > 1)) and self.runs[row]:", "S4"),
    bug("the victim's row is named wrongly", "preemption", "self.victims.append(row)", "self.victims.append(row - 1)", "S4", "L2", "Illegal"),
]  # fmt: skip

DECISION = [
    bug("a step too many in flight", "schedule", "len(state.flights) >= state.config.pipeline_depth",
        "len(state.flights) > state.config.pipeline_depth", "Illegal"),
    bug("a pipeline that is never filled", "schedule", "len(state.flights) >= state.config.pipeline_depth", "len(state.flights) >= 1", "S6"),
    bug("nobody is admitted into an idle engine", "schedule", "if work.tokens_sum == 0 and not admitted:", "if work.tokens_sum == 0:", "S6"),
    bug("priorities are turned round", "ranking", "priorities = np.array([entry.priority", "priorities = np.array([-entry.priority", "S3"),
    bug("the latest arrival of a priority first", "ranking", 'np.argsort(priorities, kind="stable")[:count].tolist()',
        'np.argsort(priorities[::-1], kind="stable")[:count].tolist()', "S3", "Error"),
    bug("victims by arrival where priority rules", "ranking", "np.lexsort((rows.id, rows.cells[columns.PRIORITY]))",
        "np.lexsort((rows.cells[columns.PRIORITY], rows.id))", "S4"),
    bug("a scheduler that gives up under pressure", "schedule", "return make_room(state)", "return None", "S6"),
    Bug(name="a request that gives way goes to the back of the line", found_by=("M5", "L2"), edits=(
        Edit("state.order", "len(queue) if not queue or queue[-1].id < entry.id else", "len(queue) if True else"),
    )),
]  # fmt: skip

OWN_POLICIES = [
    bug("all live requests of a tenant count as running", "ranking", "tenant_running=running[request.root]",
        "tenant_running=live[request.root]", "S3", "S4"),
    bug("a tenant's share leaves out who waits", "ranking", "Counter(state.requests[id_].root for id_ in progress)",
        "Counter(state.requests[id_].root for id_ in columns_read[0])", "S3", "S4", "Error"),
    bug("what waits counts as computed", "ranking", "(entry.known, 0, entry.epoch, False)", "(entry.known, entry.known, entry.epoch, False)",
        "S3", "S4"),
    bug("an own policy without patience", "ranking", "if candidate.preemptions >= PATIENCE else", "if candidate.preemptions > 999 else",
        "S3", "S4", "L1"),
    bug("the worst waiting request first", "ranking", "key=lambda place: ranked[waiting[place].id])[:count]",
        "key=lambda place: ranked[waiting[place].id])[::-1][:count]", "S3"),
    bug("the best running request gives way", "ranking", "sorted(range(len(rows)), key=lambda row: ranked[ids[row]])",
        "sorted(range(len(rows)), key=lambda row: ranked[ids[row]])[::-1]", "S4"),
]  # fmt: skip

SCHED_BUGS = [*ADMISSION, *PREEMPTION, *DECISION, *OWN_POLICIES]
