"""Faults around clients: service that is not counted or not forgotten, turns that are not taken, and the wrong one preempted."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


CLIENT_BUGS = [
    bug("clients are served as they come", "sched.ranking", "(0, 0, 0, id_) if hurries else (1, key[0], service, id_)", "(0, 0, 0, id_)", "S3", "S4", "F1"),
    bug("the client that had most goes first", "sched.ranking", "(1, key[0], service, id_)", "(1, key[0], -service, id_)", "S3", "S4", "F1"),
    bug("turns come before priorities", "sched.ranking", "(1, key[0], service, id_)", "(1, 0, service, id_)", "S3", "S4"),
    bug("one plan gives a client several turns", "sched.ranking", "served[key] += state.waiting[place].known", "served[key] += 0", "S3"),
    bug("a client's later request overtakes its first", "sched.ranking", "turns = [(_turn(state, key, queue[0], served[key], oldest), key, 0) for", "turns = [(_turn(state, key, queue[-1], served[key], oldest), key, len(queue) - 1) for", "S3"),
    bug("turns starve who was preempted often", "sched.ranking", "oldest.get(key) == id_ and state.waiting[_place(state, id_)].preemption_count >= PATIENCE", "False", "S3", "S4"),
    bug("a newcomer begins with nothing", "state.store.clients", "if served[key] <= start:", "if False:", "F2"),
    bug("a newcomer begins behind who had most", "state.store.clients", "return min((served[other]", "return max((served[other]", "F2"),
    bug("newcomers do not put one another off", "state.store.clients", "next_start=start + NEXT_TOKENS * prices[key]", "next_start=start", "F2"),
    bug("rows do not count", "state.store.clients", "found[request.priority, request.client] += cost", "pass", "S3", "S4", "F2"),
    bug("hits count", "state.store.clients", "-_cost(state, each, at), 1", "0, 1", "F2"),
    bug("a preempted request is forgiven", "state.store.clients", "cost=_cost(state, request, int(state.rows.computed[row])), rows=-1)", "rows=-1)", "F2"),
    bug("who leaves is forgotten", "state.store.clients", "in {**clients.idle, **ended}.items() if key[0] in classes}", "in clients.idle.items() if key[0] in classes}", "F2"),
    bug("the idle outlive their priority", "state.store.clients", "ended}.items() if key[0] in classes}", "ended}.items()}", "F2", "F3"),
    bug("an aborted request still waits for its client", "state.store.clients", "(_Change(key_of(state.requests[id_]), leaves=id_) for id_ in ids)", "()", "F3", "F2"),
    bug("a preempted request joins the end of its client's queue", "state.store.clients", "tuple(sorted((*queue, change.joins)))", "(*queue, change.joins)", "F3"),
    bug("a second client comes to who is alone", "state.store.clients", "if clients.alone == key:", "if clients.alone is not None:", "F3"),
    bug("who was alone has no rows", "state.store.clients", "rows=len(state.rows), queue=tuple(entry.id for", "rows=0, queue=tuple(entry.id for", "F3"),
    bug("who was alone waits for nothing", "state.store.clients", "queue=tuple(entry.id for entry in state.waiting))", "queue=())", "F3"),
    bug("who was alone had what it was never charged", "state.store.clients", "Client(charged=0, rows=len", "Client(charged=9, rows=len", "F2"),
    bug("who came last is alone", "state.store.clients", "if len(state.requests) == 0 and not", "if len(state.requests) <= 1 and not", "F3"),
    bug("weights are ignored", "state.store.clients", "return clients.unit // request.weight", "return clients.unit", "F2"),
    bug("a weight multiplies", "state.store.clients", "return clients.unit // request.weight", "return clients.unit * request.weight", "F2"),
    bug("a request leaves with another weight", "state.store.clients", "return tokens * price(state.clients, request) if", "return tokens * state.clients.unit if", "F2"),
    bug("a plan's turns ignore the weights", "sched.ranking", ".known * price(state.clients, state.requests[state.waiting[place].id])", ".known * state.clients.unit", "S3"),
    bug("the first weight forgets what was charged", "state.store.clients", "charged=UNIT * each.charged", "charged=each.charged", "F2"),
    bug("the first weight forgives the idle", "state.store.clients", "idle={key: UNIT * service for", "idle={key: service for", "F2"),
    bug("the first weight lets newcomers start early", "state.store.clients", "next_start=UNIT * group.next_start", "next_start=group.next_start", "F2"),
    bug("newcomers put one another off by tokens without weight", "state.store.clients", "next_start=start + NEXT_TOKENS * prices[key]", "next_start=start + NEXT_TOKENS * clients.unit", "F2"),
    bug("a snapshot forgets the units", "log.stored_pages", "unit=clients.unit", "unit=1", "X2", "Y1"),
    bug("a snapshot forgets the weights in turns", "log.snapshot", "weight=life.weight", "weight=1", "X2", "Y1", "F2"),
    bug("a snapshot forgets what clients had", "log.stored_pages", "charged |= {(priority, number): tokens for priority, number, tokens in stored.live}", "", "X2", "Y1"),
]  # fmt: skip
