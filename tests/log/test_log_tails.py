"""The compiled tails are the plain ones, equal on every call of seeded runs; no memory outside an array is touched."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from log_drive import drawn_config, engine, started

from vnext.log import codec, open_blocks_plain, pseudonyms, redaction
from vnext.log.redaction import Redactor
from vnext.state.events import StepCommitted, StepPlanned, pack_tokens
from vnext.state.fold_commit import match_samples

KEY = bytes(range(16))


def portable(*arguments) -> object:
    """The compiled tails without this processor's own instructions."""
    return redaction._open_blocks.OpenBlocks(*arguments, True)


FORMS = [
    open_blocks_plain.OpenBlocks,
    *([redaction._open_blocks.OpenBlocks, portable] if redaction._open_blocks else []),
]
compiled = pytest.mark.skipif(redaction._open_blocks is None, reason="the compiled tails are not built here: no C compiler")


class Both:
    """Tails in both forms: every call goes to each, and they must agree on what it gives or raises."""

    def __init__(self, *arguments) -> None:
        self.forms = [form(*arguments) for form in FORMS]
        self.calls: list[str] = []

    def __len__(self) -> int:
        return self._same("__len__", [len(form) for form in self.forms])

    def _same(self, name: str, results: list):
        assert all(result == results[0] for result in results), name
        self.calls.append(name)
        return results[0]

    def ids(self) -> list[int]:
        return self._same("ids", [sorted(form.ids()) for form in self.forms])

    def put_steady(self, frame: bytearray, *arguments) -> bool:
        frames = [bytearray() for _ in self.forms]
        results = [form.put_steady(mine, *arguments) for form, mine in zip(self.forms, frames)]
        assert all(mine == frames[0] for mine in frames)
        frame[:] = frames[0]
        return self._same("put_steady", results)

    def __getattr__(self, name: str):
        return lambda *arguments: self._same(name, [outcome(getattr(form, name), arguments) for form in self.forms])


def outcome(call, arguments):
    try:
        return call(*arguments)
    except (KeyError, ValueError) as error:
        return type(error)


@compiled
def test_the_two_forms_agree_on_every_call(monkeypatch):
    """Each step's commit, alone and as a steady frame on tails of their own, over engines of any shape."""
    monkeypatch.setattr(redaction, "OpenBlocks", Both)
    assert sum(map(steady_frames, range(40))) > 400


def steady_frames(seed: int) -> int:
    """Compares one engine's shapes; how many of its frames were made in one go."""
    config = drawn_config(random.Random(seed))
    whole, steady = Redactor(started(config), KEY), Redactor(started(config), KEY)
    frame, width, made = bytearray(), codec.first_header(started(config), "shape", "1").token_width, 0
    for events, befores, _, _ in engine(config, seed, arrivals=60):
        pairs = list(zip(befores, events))
        matched = [match_samples(*pair) if isinstance(pair[1], StepCommitted) else None for pair in pairs]
        shaped = [whole.redact(*pair, each) for pair, each in zip(pairs, matched)]
        if codec.steady_pair(events) and steady.put_steady(frame, 7, befores[0], events, matched[0], width):
            assert frame[codec.FRAME_HEAD :] == codec.encode_body(7, shaped, (), 0, width)
            made += 1
        else:
            assert [steady.redact(*pair, each) for pair, each in zip(pairs, matched)] == shaped
    assert {"arrive", "commit", "__len__"} <= set(whole._open_blocks.calls)
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size, base", [(1, 4), (3, 256), (16, 2**18), (27, 2**18), (100, 2**30)])
def test_a_history_has_the_same_pseudonyms_however_it_came(form, block_size, base):
    """As one prompt, as a prompt and commits, and by the arithmetic of log/pseudonyms.py."""
    rng = random.Random(block_size)
    histories = [[rng.randrange(base) for _ in range(130)] for _ in range(90)]
    secret, kept = pseudonyms.root_secret(KEY, "salt"), form(KEY, block_size, base)
    arrived = [kept.arrive(place, secret, pack_tokens(history[:40])) for place, history in enumerate(histories)]
    shaped = [np.frombuffer(prompt, "<i4").tolist() for prompt in arrived]
    ids, rows, stopped = np.arange(90), np.arange(90), np.zeros(90, dtype=bool)
    for at in range(40, 130):
        sampled = kept.commit(ids, rows, pack_tokens([history[at] for history in histories]), None, stopped)
        for one, token in zip(shaped, np.frombuffer(sampled, "<i4")):
            one.append(token)
    for history, found in zip(histories, shaped):
        data = pack_tokens(history)
        secrets = pseudonyms.words(pseudonyms.block_secrets(KEY, secret, data, block_size))
        due = pseudonyms.pseudonyms(secrets, np.asarray(history, dtype=np.int32), block_size, base)[0]
        assert found == due.tolist() and kept.history(secret, data) == pack_tokens(due)


@compiled
def test_secrets_are_keyed_blake2b():
    """One permutation per position: where histories first differ by a block, hashlib's secret explains what follows."""
    kept = redaction._open_blocks.OpenBlocks(KEY, 2, 256)
    root, block = pseudonyms.root_secret(KEY, ""), pack_tokens([5, 6])
    child = hashlib.blake2b(b"next" + root + block, key=KEY, digest_size=16).digest()
    assert kept.history(root, block + pack_tokens([9]))[8:] == kept.history(child, pack_tokens([9]))


@pytest.mark.parametrize("form", FORMS)
def test_requests_come_and_go(form):
    kept, root = form(KEY, 4, 256), pseudonyms.root_secret(KEY, "")
    for id_ in range(500):
        kept.arrive(id_, root, pack_tokens([id_ % 7] * (1 + id_ % 9)))
    kept.forget([id_ for id_ in range(500) if id_ % 3])
    left = list(range(0, 500, 3))
    assert sorted(kept.ids()) == left and len(kept) == len(left)
    rows, tokens = np.arange(len(left)), pack_tokens([1] * len(left))
    found = kept.commit(np.array(left), rows, tokens, None, np.zeros(len(left), dtype=bool))
    due = [kept.history(root, pack_tokens([id_ % 7] * (1 + id_ % 9) + [1]))[-4:] for id_ in left]
    assert found == b"".join(due)
    with pytest.raises(KeyError):
        kept.forget([0, 1])
    assert len(kept) == len(left) - 1 and kept.arrive(0, root, b"") == b""


@pytest.mark.parametrize("form", FORMS)
def test_dropped_samples_and_ending_tokens(form):
    kept, root = form(KEY, 4, 256), pseudonyms.root_secret(KEY, "")
    for id_ in (4, 9):
        kept.arrive(id_, root, pack_tokens([1, 2, 3]))
    ids, rows, samples, stopped = np.array([9, 7, 4]), np.array([2, 0]), np.array([0, 2]), np.array([False, True])
    found = np.frombuffer(kept.commit(ids, rows, pack_tokens([50, 60, 70]), samples, stopped), "<i4")
    due = kept.history(root, pack_tokens([1, 2, 3, 50]))[-4:]
    assert found[0] == np.frombuffer(due, "<i4")[0] and found[1] == 256 and found[2] == 70


ONE = np.zeros(1, dtype=bool)
NO_ROW, ROW = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ids, rows, tokens, samples, stopped, error",
    [
        (ROW + 5, ROW, b"\1\0\0\0", None, ONE, KeyError),
        (ROW, ROW, b"\1\0\0\0" * 2, None, ONE, ValueError),
        (ROW, ROW, b"\1\0\0\0", None, ONE[:0], ValueError),
        (ROW, ROW, b"\1\0\0\0", NO_ROW, ONE, ValueError),
    ],
)
def test_columns_that_do_not_fit_are_refused(form, ids, rows, tokens, samples, stopped, error):
    kept = form(KEY, 4, 256)
    kept.arrive(0, bytes(16), b"")
    with pytest.raises(error):
        kept.commit(ids, rows, tokens, samples, stopped)
    assert kept.commit(ROW, ROW, b"\1\0\0\0", None, ONE) == kept.history(bytes(16), b"\1\0\0\0"), "nothing has changed"


@compiled
@pytest.mark.parametrize(
    "rows, samples",
    [(ROW + 1, None), (ROW - 1, None), (ROW, ROW + 1), (ROW, ROW - 1), (np.zeros(2, dtype=np.int64), None)],
)
def test_memory_outside_an_array_is_never_touched(rows, samples):
    kept = redaction._open_blocks.OpenBlocks(KEY, 4, 256)
    for id_ in range(3):
        kept.arrive(id_, bytes(16), pack_tokens([1, 2, 3]))
    with pytest.raises(ValueError):
        kept.commit(ROW, rows, b"\1\0\0\0" * len(rows), samples, np.zeros(2, dtype=bool))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", [(b"short", 4, 256), (KEY, 0, 256), (KEY, 4, 512), (KEY, 4, 300), (KEY, 4, 0)])
def test_tails_that_cannot_work_are_refused(form, arguments):
    with pytest.raises(ValueError):
        form(*arguments)


@pytest.mark.parametrize("form", FORMS)
def test_secrets_and_tokens_of_other_sizes_are_refused(form):
    kept = form(KEY, 4, 256)
    for arguments in ((0, bytes(15), b""), (0, bytes(16), b"12345"), (-1, bytes(16), b"")):
        with pytest.raises(ValueError):
            kept.arrive(*arguments)
    kept.arrive(0, bytes(16), b"")
    with pytest.raises(ValueError, match="tail already"):
        kept.arrive(0, bytes(16), b"")


@compiled
def test_the_installed_form_is_the_compiled_one():
    assert redaction.OpenBlocks is redaction._open_blocks.OpenBlocks


@pytest.mark.parametrize("form", FORMS)
def test_ids_stay_as_they_were_asked_for(form):
    kept = form(KEY, 4, 256)
    for id_ in range(3):
        kept.arrive(id_, bytes(16), b"")
    ids = kept.ids()
    kept.forget(ids[:2])
    assert sorted(ids) == [0, 1, 2] and kept.ids() == ids[2:]


def test_places_of_requests_that_have_gone_are_taken_again():
    kept = open_blocks_plain.OpenBlocks(KEY, 4, 256)
    places = len(kept._counts)
    for id_ in range(3 * places):
        kept.arrive(id_, bytes(16), b"")
        kept.forget([id_])
    assert len(kept._counts) == places


@pytest.mark.parametrize("form", FORMS)
def test_a_steady_frame_is_a_commit_in_a_frame(form):
    one, other, frame = form(KEY, 4, 256), form(KEY, 4, 256), bytearray()
    for kept in (one, other):
        kept.arrive(0, bytes(16), pack_tokens([1, 2, 3]))
    shaped = one.commit(ROW, ROW, pack_tokens([9]), None, ONE)
    assert other.put_steady(frame, 5, 7, 8, 2, (ROW, ROW, pack_tokens([9]), ONE))
    events = (StepCommitted(step=7, tokens=shaped), StepPlanned(step=8))
    assert frame[codec.FRAME_HEAD :] == codec.encode_body(5, events, (), 0, 2)
