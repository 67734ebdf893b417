"""Letters to clients: columns and named outputs together say what the plain outputs of every event say."""

from __future__ import annotations

import random

import pytest
from core_drive import Engine

from vnext.runtime.client.client import engine_decoder
from vnext.runtime.engine.owners import Owners, to_client
from vnext.runtime.protocol.messages import Outputs, RequestOutput, encoder
from vnext.state.events import RequestAborted, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.fold_commit import match_samples
from vnext.state.outputs import outputs, outputs_apart

PEERS = (b"one", b"two", b"three")


class Reader:
    """A client: what it was told of each of its requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.finish: dict[str, str] = {}
        self._names: dict[int, str] = {}

    def read(self, letter: Outputs) -> None:
        letter = engine_decoder.decode(encoder.encode(letter))
        for number, token in zip(memoryview(letter.numbers).cast("q"), unpack_tokens(letter.tokens).tolist()):
            self.tokens[self._names[number]].append(token)
        for output in letter.outputs:
            self._names[output.number] = output.name
            self.tokens.setdefault(output.name, []).extend(unpack_tokens(output.tokens).tolist())
            self.cached[output.name] = max(self.cached.get(output.name, 0), output.cached_tokens)
            self.finish[output.name] = output.finish


class Office:
    """An engine, the owners of its requests and their readers, beside what the plain outputs say."""

    def __init__(self, peers: tuple[bytes, ...], **config: object) -> None:
        self.engine, self.owners = Engine(**config), Owners()
        self.readers = {peer: Reader() for peer in peers}
        self.plain = {peer: Reader() for peer in peers}
        self.peer_of: dict[str, bytes] = {}
        self.letters = 0

    def arrive(self, peer: bytes, prompt: list[int], count: int) -> int:
        id_ = self.engine.arrive(prompt, count)
        self.owners.add(peer, f"r{id_}", id_)
        self.peer_of[f"r{id_}"] = peer
        return id_

    def commit(self, rng: random.Random) -> None:
        before = self.engine.state
        tokens = [rng.randrange(33) % 16 for _ in range(int(before.in_flight[0].samples.sum()))]  # 0 ends one
        event = StepCommitted(step=before.committed, tokens=pack_tokens(tokens))
        matched = match_samples(before, event)
        self.engine.fold(event)
        going, ended = outputs_apart(before, self.engine.state, matched)
        self._tell(going, [to_client(output, None) for output in ended], before, event)

    def abort(self, ids: tuple[int, ...]) -> None:
        before, event = self.engine.state, RequestAborted(ids=ids, reason="client")
        self.engine.fold(event)
        self._tell(None, [to_client(output, None) for output in outputs(before, event, self.engine.state)], before, event)

    def _tell(self, going, ended, before, event) -> None:
        for output in outputs(before, event, self.engine.state):
            self.plain[self.peer_of[output.name]].read(Outputs(outputs=(to_client(output, None),)))
        for peer, letter in self.owners.letters((going, ended)):
            self.letters += 1
            self.readers[peer].read(letter)

    def agrees(self) -> bool:
        return all(
            (mine.tokens, mine.cached, mine.finish.keys()) == (plain.tokens, plain.cached, plain.finish.keys())
            and all(mine.finish[name] == plain.finish[name] for name in plain.finish)
            for mine, plain in ((self.readers[peer], self.plain[peer]) for peer in self.readers)
        )


@pytest.mark.parametrize("peer_count", (1, 3))
@pytest.mark.parametrize("seed", range(12))
def test_clients_hear_what_the_plain_outputs_say(peer_count: int, seed: int) -> None:
    """Few blocks: requests give way and come back with other prefix hits; some are aborted."""
    rng, peers = random.Random(seed), PEERS[:peer_count]
    office = Office(peers, page_count=8, max_num_seqs=6, pipeline_depth=1 + seed % 3)
    shared = [5, 6, 7, 8, 5, 6, 7, 8]
    for _ in range(120):
        if rng.random() < 0.3 and office.engine.state.next_id < 40:
            office.arrive(rng.choice(peers), shared[: rng.randrange(1, 9)] + [rng.randrange(1, 9)], rng.randrange(1, 20))
        live = [id_ for id_, _ in office.engine.state.requests.items()]
        if live and rng.random() < 0.04:
            office.abort((rng.choice(live),))
        office.engine.plan()
        if office.engine.state.in_flight:
            office.commit(rng)
    assert office.agrees() and any(reader.tokens for reader in office.plain.values())
    if seed % 3 == 0:
        assert office.engine.state.counters.preempted, "the blocks were meant to be too few"
    if live := tuple(sorted(id_ for id_, _ in office.engine.state.requests.items())):
        office.abort(live)
    kept = {name: value for name, value in vars(office.owners).items() if value and not name.startswith("_shares")}
    assert not kept, "nothing is known of requests that have ended"


def test_a_request_that_ends_with_its_first_token_says_how_long_it_waited() -> None:
    owners = Owners()
    owners.add(PEERS[0], "short", 7)
    owners.begun([7], {})
    ((_, letter),) = owners.letters((None, [RequestOutput(name="short", tokens=b"", finish="length", number=7)]))
    assert letter.outputs[0].queue_seconds > 0


def test_a_steady_step_is_one_letter_of_columns() -> None:
    office = Office(PEERS[:1], eos_token_ids=(), page_count=32)
    for _ in range(3):
        office.arrive(PEERS[0], [1, 2], 9)
    rng = random.Random(0)
    for _ in range(4):
        office.engine.plan()
        office.commit(rng)
    before = office.engine.state
    office.engine.plan()
    matched = match_samples(office.engine.state, StepCommitted(step=before.committed, tokens=pack_tokens([1, 2, 3])))
    ((peer, letter),) = office.owners.letters((outputs_apart(office.engine.state, office.engine.state, matched)[0], ()))
    assert (peer, letter.outputs, letter.tokens) == (PEERS[0], (), pack_tokens([1, 2, 3]))
    assert list(memoryview(letter.numbers).cast("q")) == [0, 1, 2]
