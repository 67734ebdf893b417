"""Operations whose ranks or engine core die: each is carried out once, whoever goes on with it, and a pause outlives both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vnext.runtime.engine.operations import Operations
from vnext.runtime.processes.run_dir import WEIGHTS, CoreNotes
from vnext.runtime.protocol.messages import Operate, Operated, RankAnswer
from vnext.runtime.protocol.operations import (
    AnyOperation,
    CallRanks,
    PauseEngine,
    PutToSleep,
    ResumeEngine,
    UpdateWeights,
    WakeUp,
)
from vnext.runtime.transport.ring.broadcast import decode_events
from vnext.runtime.transport.ring.commands import CheckWeights
from vnext.state.config import SchedulerConfig
from vnext.state.events import EnginePaused, EngineStarted, WeightsChanged
from vnext.state.reduce import reduce, start
from vnext.state.state import State, Weights

CONFIG = SchedulerConfig(block_size=4, page_count=8, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16)
STARTED = EngineStarted(config=CONFIG, model="m", model_digest="d", world_size=2, environment={}, started_ns=0)


class Core:
    """An engine core as operations know it: a state, ranks that answer or are dead, and clients."""

    def __init__(self, folder: Path) -> None:
        self.commands: list[Any] = []
        self.told: dict[str, tuple[str, Any]] = {}
        self.events: list[Any] = []
        self.operations = Operations(STARTED, self.send, self.tell, CoreNotes(folder))
        self.state: State = start(STARTED)
        handover = self.operations.handover
        if (weights := handover.weights) is not None:  # as EngineCore.begin_after
            self.fold(EnginePaused(mode="keep")), self.fold(WeightsChanged(**msgspec.structs.asdict(weights)))
        if self.state.paused != handover.paused:
            self.fold(EnginePaused(mode=handover.paused))
        self.events.clear()

    def send(self, message: bytes) -> None:
        self.commands += decode_events(message, 0)

    def tell(self, peer: bytes, message: Operated) -> None:
        assert message.name not in self.told, "an operation is answered once"
        self.told[message.name] = message.error, json.loads(message.value)

    def fold(self, event: Any) -> None:
        self.events.append(event)
        self.state = reduce(self.state, event)

    def ask(self, name: str, operation: AnyOperation) -> None:
        self.operations.ask_all([(b"client", Operate(name=name, operation=operation))])

    def run(self, answers: int = 10**6, events: int = 10**6, error: str = "") -> None:
        """Go on until nothing happens, or this many commands were answered or events folded."""
        while True:
            while events and (event := self.operations.next_event(self.state)) is not None:
                self.fold(event)
                events -= 1
            if not (self.commands and answers and events):
                return
            command, answers = self.commands.pop(0), answers - 1
            for rank in (0, 1):
                value = ("new" if rank == 0 else "") if isinstance(command, CheckWeights) else 7
                answer = RankAnswer(rank=rank, serial=command.serial, error=error, value=msgspec.json.encode(value))
                self.operations.answered(answer, self.state)

    def lose_ranks(self) -> None:
        self.commands.clear()
        self.operations.begin_again(self.send, ())


def update(folder: Path) -> UpdateWeights:
    """With a file of the engine's own."""
    (folder / "weights.1.safetensors").write_bytes(b"")
    return UpdateWeights(paths=(str(folder / "weights.1.safetensors"),), mode="wait")


DONE = "", {"version": 1, "digest": "new"}
DEATHS: dict[str, dict[str, int]] = {
    "before its check": {"answers": 0}, "behind its check": {"answers": 1, "events": 0}, "in its pause": {"events": 1},
    "as the weights have changed": {"events": 2}, "as the last rank loads": {"answers": 1}, "awake again": {"events": 3},
}  # fmt: skip


@pytest.mark.parametrize("where", DEATHS)
@pytest.mark.parametrize("who", ["ranks", "core"])
def test_an_update_is_made_once(where: str, who: str, tmp_path: Path) -> None:
    core, operation = Core(tmp_path), update(tmp_path)
    core.ask("u", operation)
    core.run(**DEATHS[where])
    assert core.told == {}
    if who == "ranks":
        made = 0
        core.lose_ranks()
    else:
        core = Core(tmp_path)
        made = core.state.weights is not None
        assert core.state.paused == ""
        core.ask("u", operation)
    core.run()
    assert core.told == {"u": DONE}
    assert made + sum(isinstance(event, WeightsChanged) for event in core.events) == 1
    assert core.state.paused == "" and core.state.weights == Weights(1, "new", operation.paths[0])
    assert Path(operation.paths[0]).exists()


def test_another_update_is_another_version(tmp_path: Path) -> None:
    core = Core(tmp_path)
    for name, version in (("u", 1), ("v", 2)):
        core.ask(name, update(tmp_path))
        core.run()
        assert core.told[name] == ("", {"version": version, "digest": "new"})
    core = Core(tmp_path)
    core.ask("v", update(tmp_path))
    core.run()
    assert core.told["v"][1]["version"] == 2 and core.events == []


@pytest.mark.parametrize("asked", ["wait", "keep", "sleep"])
def test_a_pause_outlives_an_update_and_a_death(asked: str, tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.ask("p", PutToSleep() if asked == "sleep" else PauseEngine(mode=asked))
    core.run()
    for _ in range(2):
        assert core.state.paused == asked
        core = Core(tmp_path)
        core.ask(f"u{_}", update(tmp_path))
        core.run()
    core.ask("r", WakeUp() if asked == "sleep" else ResumeEngine())
    core.run()
    assert core.state.paused == "" == Core(tmp_path).state.paused


def test_a_wrong_update_leaves_no_file_and_no_pause(tmp_path: Path) -> None:
    core, operation = Core(tmp_path), update(tmp_path)
    core.ask("u", operation)
    core.run(error="it lacks 'x'; nothing has changed")
    assert core.told == {"u": ("it lacks 'x'; nothing has changed", None)} and core.events == []
    assert not Path(operation.paths[0]).exists()


def test_a_full_disk_is_one_sentence_and_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(tmp_path)

    def full(self: CoreNotes, name: str, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CoreNotes, "replace", full)
    for name, operation in (("u", update(tmp_path)), ("p", PauseEngine()), ("s", PutToSleep())):
        core.ask(name, operation)
        core.run()
        assert "No space left on device" in core.told[name][0] and core.told[name][0].endswith("nothing has changed")
        assert core.state.weights is None and core.state.paused == ""


def test_weights_of_another_model_are_not_taken_over(tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.ask("u", update(tmp_path)), core.ask("p", PauseEngine(mode="keep"))
    core.run()
    other = Operations(msgspec.structs.replace(STARTED, model_digest="e"), core.send, core.tell, CoreNotes(tmp_path))
    assert (other.handover.weights, other.handover.paused) == (None, "keep")


def test_a_note_is_whole_or_the_one_before(tmp_path: Path) -> None:
    notes = CoreNotes(tmp_path)
    notes.replace(WEIGHTS, "one")
    (tmp_path / f"{WEIGHTS}.part").write_text("half of tw")  # killed as it wrote
    assert notes.text(WEIGHTS) == "one"
    notes.replace(WEIGHTS, "two")
    assert notes.text(WEIGHTS) == "two" and CoreNotes("").text(WEIGHTS) is None


def test_calls_are_asked_again(tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.ask("c", CallRanks(function="process_id"))
    core.run(answers=0)
    core.lose_ranks()
    core.run()
    assert core.told == {"c": ("", [7, 7])}
