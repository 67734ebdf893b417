"""The routes for trainers: streams that live across a change in every mode, sleep, and a server that does not open them."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file, save_file
from saved_adapters import DEMO
from serving import Server, eventually, in_background, serving

from tests.run.stops import CORE, Stops
from vnext.api.llm import LLM
from vnext.commands.bench.load.answers import RequestFailed
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.sampling_params import SamplingParams

OPTIONS = ("--enable-rl-routes", "--log", "full", "--dtype", "float32", "--threads", "1", "--num-gpu-blocks-override", "200")
PROMPT, COUNT = list(range(40, 60)), 300
BODY = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Old and new weights of the demo model, each a file."""
    folder, generator = tmp_path_factory.mktemp("weights").resolve(), torch.Generator().manual_seed(5)
    old = load_file(DEMO / "model.safetensors")
    new = {name: (each.float() + 0.02 * torch.randn(each.shape, generator=generator)).to(each.dtype) for name, each in old.items()}
    for name, tensors in {"old": old, "new": new}.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in ("old", "new")}


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Stops:
    return Stops(tmp_path_factory.mktemp("stops"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stops: Stops) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("log"), *OPTIONS, "--check-laws", more=stops.environment) as running:
        yield running
        log_dir = running.log_dir
        assert running.stop() == 0
    assert replay(["verify", "--laws", str(log_dir)]) == 0


def call(server: Server, path: str, body: Any = None, method: str = "POST") -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data is not None else {}
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Stream(threading.Thread):
    """A stream that is read in the background: its token ids, and its finish reason or the code of its error."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.client, self.tokens, self.finish = BlockingClient(server.url), list[int](), ""
        self.start()

    def run(self) -> None:
        try:
            for chunk in self.client.stream("/v1/completions", BODY):
                self.tokens += chunk.token_ids
                self.finish = next((each.finish_reason for each in chunk.choices or () if each.finish_reason), self.finish)
        except RequestFailed as error:
            self.finish = error.stated[1]


@contextmanager
def begun(server: Server, stops: Stops) -> Iterator[Stream]:
    """A stream that has some tokens and gets no more in the block."""
    stops.ask()
    stream = Stream(server)
    with stops.held(server):
        yield stream


def changed(server: Server, stops: Stops, path: str, body: Any = None) -> tuple[Stream, int, dict[str, Any]]:
    """A stream in whose middle the engine is asked for something; the answer to that."""
    with begun(server, stops) as stream, stops.operation():
        thread, found = in_background(lambda: call(server, path, body))
    thread.join()
    return stream, *found[0]


def answers(files: dict[str, Path], name: str, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """What an engine with these weights alone says."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    with engines_here(), LLM(executor="inproc", threads=1, dtype="float32", log="off") as llm:
        llm.update_weights(files[name])
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, False)]


def test_a_stream_finishes_with_the_old_weights(server, files, stops):
    assert call(server, "/update_weights", {"path": str(files["old"])})[0] == 200
    stream, status, now = changed(server, stops, "/update_weights", {"path": str(files["new"]), "mode": "wait"})
    stream.join()
    assert status == 200 and stream.finish == "length"
    assert stream.tokens == answers(files, "old", [PROMPT], [COUNT])[0]
    status, paused = call(server, "/is_paused", method="GET")
    assert paused == {"is_paused": False, "mode": "", **now}


def test_a_stream_goes_on_with_the_new_weights(server, files, stops):
    assert call(server, "/update_weights", {"path": str(files["old"])})[0] == 200
    stream, status, _ = changed(server, stops, "/update_weights", {"path": str(files["new"]), "mode": "keep"})
    stream.join()
    assert status == 200 and stream.finish == "length" and len(stream.tokens) == COUNT
    old = answers(files, "old", [PROMPT], [COUNT])[0]
    common = next(place for place, (one, other) in enumerate(zip(stream.tokens, old)) if one != other)
    places = [place for place in range(1, common + 1)]
    rests = answers(files, "new", [PROMPT + old[:place] for place in places], [COUNT - place for place in places])
    assert any(stream.tokens == old[:place] + rest for place, rest in zip(places, rests)), "from one token on, all are the new weights'"


def test_a_stream_is_aborted(server, files, stops):
    stream, status, _ = changed(server, stops, "/update_weights", {"path": str(files["old"]), "mode": "abort"})
    stream.join()
    assert status == 200 and stream.finish == "aborted" and len(stream.tokens) < COUNT


def test_a_wrong_update_aborts_nobody(server, tmp_path, stops):
    save_file({"x": torch.zeros(3)}, tmp_path / "wrong.safetensors")
    wrong = {"path": str(tmp_path / "wrong.safetensors"), "mode": "abort"}
    stream, status, answer = changed(server, stops, "/update_weights", wrong)
    assert status == 400 and answer["error"]["code"] == "not_done" and "nothing has changed" in answer["error"]["message"]
    stream.join()
    assert stream.finish == "length" and len(stream.tokens) == COUNT


def test_pause_keeps_a_stream_where_it_is(server, stops):
    stream, *answer = changed(server, stops, "/pause?mode=keep")
    assert answer == [200, {"paused": "keep"}]
    count = len(stream.tokens)
    assert eventually(lambda: call(server, "/is_paused", method="GET")[1]["mode"] == "keep")
    assert call(server, "/health", method="GET")[0] == 200
    assert call(server, "/resume")[0] == 200
    stream.join()
    assert len(stream.tokens) == COUNT > count


def test_sleep_with_a_stream_and_wake_up(server, stops):
    stream, status, asleep = changed(server, stops, "/sleep?level=1&mode=keep")
    assert status == 200 and stream.is_alive()
    assert call(server, "/is_sleeping", method="GET")[1] == {
        "is_sleeping": True, "asleep": ["weights", "kv_cache"], "resident_bytes": asleep["resident_bytes"],
    }  # fmt: skip
    assert call(server, "/wake_up?tags=weights")[1]["asleep"] == ["kv_cache"]
    assert call(server, "/wake_up")[1]["asleep"] == []
    stream.join()
    assert stream.finish == "length" and len(stream.tokens) == COUNT


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/pause?mode=later", None, "mode is 'later': it is one of wait, keep, abort."),
        ("/sleep?level=7", None, "level is '7': 1 keeps the weights' files, 2 forgets the weights."),
        ("/wake_up?tags=all", None, "There is no part 'all': tags are weights, kv_cache."),
        ("/update_weights", {}, "Give either path or tensors: the new weights come from one of them."),
        ("/update_weights", {"path": "weights"}, "path is 'weights': give an absolute one, as the server sees it."),
        ("/collective_rpc", {"method": "exec"}, "There is no function 'exec' on the ranks"),
        ("/update_weights", {"tensors": [{"name": "x", "dtype": "float32", "shape": [1], "segment": "none"}]}, "cannot be read"),
    ],
)
def test_bad_input(server, path, body, sentence):
    status, answer = call(server, path, body)
    assert 400 <= status < 410 and sentence in answer["error"]["message"]


def test_calls_and_the_cache(server):
    assert len(call(server, "/collective_rpc", {"method": "process_id"})[1]["results"]) == 1
    assert call(server, "/reset_prefix_cache") == (200, {})


def test_an_engine_core_that_follows_another_has_the_weights_of_its_last_change(files, tmp_path, stops):
    """A stream that lives through the core's death goes on with the version that it began with."""
    with serving(tmp_path, *OPTIONS, more=stops.environment) as running:
        assert call(running, "/update_weights", {"path": str(files["new"])})[0] == 200
        with begun(running, stops) as stream:
            running.process_of(CORE).kill()
        stream.join()
        assert stream.finish == "length" and stream.tokens == answers(files, "new", [PROMPT], [COUNT])[0]
        assert call(running, "/is_paused", method="GET")[1]["version"] == 1


def test_ranks_that_follow_others_have_the_weights_of_the_last_change(server, files, stops):
    assert call(server, "/update_weights", {"path": str(files["new"])})[0] == 200
    with begun(server, stops) as stream:
        server.process_of("vnext.runtime.rank.main").kill()
    stream.join()
    assert stream.finish == "length" and stream.tokens == answers(files, "new", [PROMPT], [COUNT])[0]
