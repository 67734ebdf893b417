"""Parts of a server are killed, and its clients notice nothing but a pause: what is bounded here, kill_under_load.py --survive repeats."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from serving import END_TIMEOUT_S, ROOT, Server, complete_all, eventually, fill, held, in_background, serving

from vnext import LLM, BeamSearchParams, SamplingParams
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.client.output_stream import EngineDead
from vnext.state.events import EngineRecovered

COMMON = ("--dtype", "float32", "--threads", "1", "--digest-interval", "1", "--served-model-name", "demo", "--log", "full")
CORE = "vnext.runtime.engine.main"
LONG = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 600, "ignore_eos": True, "temperature": 0.8, "seed": 3}


def kill(server: Server, module: str) -> None:
    os.kill(server.process_of(module).pid, signal.SIGKILL)


def cores_of(server: Server, module: str = CORE) -> set[int]:
    """Processes that run an engine core, or another module, at most one at a time."""
    found = set()
    for process in server.processes[1:]:
        with suppress(psutil.Error):  # it has ended meanwhile
            found |= {process.pid} if module in process.cmdline() else set()
    return found


def text_of(server: Server) -> object:
    return complete_all(server.url, [LONG], 1)[0]["choices"][0]["text"]


def wait_until_it_runs(server: Server) -> None:
    assert eventually(lambda: server.metric("vnext_num_requests_running") == 1)


def respond(server: Server, **body: object) -> dict[str, object]:
    asked = urllib.request.Request(f"{server.url}/v1/responses", json.dumps({"temperature": 0} | body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def status_of(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_streams_survive_whatever_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions and chats through the openai package, greedy and seeded, with tools, schemas, log-probabilities. The engine core
    is killed at a random instant, a rank in a prefill, both ranks while the log is written, and all of them twice."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from kills_survived import KINDS, OPTIONS, logs_verified, survive

    with serving(tmp_path, *OPTIONS, "--tensor-parallel-size", "2", "--served-model-name", "demo") as server:
        load, kills = asyncio.run(survive(server.url, server.process.pid, 4, 16, 7, tuple(KINDS)))
        assert load.wrong == [] and load.compared >= 16
        assert [each.kind for each in kills] == list(KINDS) and sum(each.processes for each in kills) >= 8
        assert server.metric("vnext_recoveries_total") >= 4 and server.metric("vnext_recovery_seconds_total") > 0
        assert server.stop() == 0
    count, wrong = logs_verified(tmp_path)
    assert wrong == [] and 3 <= count <= 4


def test_while_the_engine_recovers_health_says_so_and_requests_wait(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMON) as server:
        expected = text_of(server)
        assert status_of(f"{server.url}/health")[0] == 200
        first = server.process_of(CORE)
        kill(server, CORE)
        assert eventually(lambda: status_of(f"{server.url}/health")[0] == 503)
        assert status_of(f"{server.url}/live")[0] == 200
        assert text_of(server) == expected, "a request that comes during the recovery"
        assert status_of(f"{server.url}/health")[0] == 200 and server.metric("vnext_recoveries_total") == 1
        assert server.process_of(CORE).pid != first.pid
        assert server.stop() == 0
        said = server.process.stderr.read()
    assert said.count("was killed by SIGKILL") == 1 and f"is started again; its log is in {server.log_dir}" in said
    [before, after] = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert replay(["verify", "--laws", str(before)]) == replay(["verify", "--laws", str(after)]) == 0
    recovered = next(item.event for item in fold(open_log(after)) if isinstance(item, Folded))
    assert isinstance(recovered, EngineRecovered) and recovered.log == str(before) and recovered.frames > 600
    assert "SIGKILL" in recovered.cause


def test_another_api_server_answers_at_the_port_and_the_old_ones_requests_end(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMON) as server:
        expected = text_of(server)
        stored = respond(server, input="One", max_output_tokens=4)
        with held(server):
            thread, found = in_background(lambda: text_of(server))
            wait_until_it_runs(server)
            kill(server, "vnext.server")
        thread.join(END_TIMEOUT_S)
        assert isinstance(found[0], Exception), "its sockets are lost"
        assert eventually(lambda: status_of(f"{server.url}/health")[0] == 200)
        assert eventually(lambda: server.metric("vnext_num_requests_running") == 0)
        assert server.metric("vnext_requests_aborted_total") == 1
        assert text_of(server) == expected
        assert json.loads(status_of(f"{server.url}/v1/responses/{stored['id']}")[1]) == stored
        assert respond(server, input="Two", max_output_tokens=4, previous_response_id=stored["id"])["status"] == "incomplete"
        assert server.stop() == 0
    assert replay(["verify", "--laws", str(server.log_dir)]) == 0


def test_an_engine_core_that_always_dies_ends_the_server_with_a_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMON, "--max-restarts", "2") as server:
        family = server.processes
        with held(server):
            thread, found = in_background(lambda: text_of(server))
            wait_until_it_runs(server)
            killed = cores_of(server)
            kill(server, CORE)
        while server.process.poll() is None and len(killed) < 4:
            for pid in cores_of(server) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert server.process.wait(END_TIMEOUT_S) == 1
        thread.join(END_TIMEOUT_S)
        said = server.process.stderr.read()
        _, alive = psutil.wait_procs(family[1:], timeout=END_TIMEOUT_S)
    last = sorted(path for path in tmp_path.iterdir() if path.is_dir())[-1]
    assert not alive and len(killed) == 3, "one, and two that followed"
    assert re.search(r"^vnext serve: engine core was killed by SIGKILL .*The log is in /\S+\.$", said, re.MULTILINE), said
    assert last.is_dir() and "Traceback" not in said
    assert "is not started again. The log that led to it is in" in str(found[0]), found


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_during_a_recovery_drains_or_ends(tmp_path: Path, signals: int) -> None:
    with serving(tmp_path, *COMMON) as server:
        expected = text_of(server)
        family = server.processes
        with held(server):
            thread, found = in_background(lambda: text_of(server))
            wait_until_it_runs(server)
            kill(server, CORE)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert server.process.wait(END_TIMEOUT_S) == 0
        thread.join(END_TIMEOUT_S)
        _, alive = psutil.wait_procs(family[1:], timeout=END_TIMEOUT_S)
    assert not alive
    is_cut_off = signals == 2 and "before its answer was complete" in str(found[0])
    assert found == [expected] or is_cut_off, "a quick engine is back before the second signal"


def test_what_dies_is_started_again_though_nobody_reads_what_its_server_says(tmp_path: Path) -> None:
    """Its standard output and error are pipes that are full."""
    with serving(tmp_path, *COMMON) as server:
        expected = text_of(server)
        for descriptor in (1, 2):
            fill(server.process, descriptor)
        first = cores_of(server)
        kill(server, CORE)
        assert eventually(lambda: bool(cores_of(server) - first)) and text_of(server) == expected
        first = cores_of(server, "vnext.server")
        kill(server, "vnext.server")
        assert eventually(lambda: bool(cores_of(server, "vnext.server") - first)) and text_of(server) == expected
        server.process.terminate()
        assert server.process.wait(END_TIMEOUT_S) == 0


def test_a_killed_launcher_takes_everything_along_also_during_a_recovery(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMON) as server:
        first = cores_of(server)
        kill(server, CORE)
        assert eventually(lambda: bool(cores_of(server) - first))
        family = server.processes
        server.process.kill()
        _, alive = psutil.wait_procs(family[1:], timeout=END_TIMEOUT_S)
    assert not alive


def test_an_llm_goes_on(tmp_path: Path) -> None:
    """Answers, several to a prompt, beams, scores of prompts, embeddings: with the engine core killed in the middle of each."""
    prompts = [[5 + index, 6, 7, 8] * 30 for index in range(6)]
    sampled = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.8, seed=3, n=2, logprobs=1, prompt_logprobs=1)
    with LLM(dtype="float32", threads=1, log_dir=str(tmp_path), seed=5) as llm:
        works: list[Callable[[], object]] = [
            lambda: llm.generate(prompts, sampled, use_tqdm=False),
            lambda: llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=20)),
            lambda: llm.embed(prompts),
        ]
        for work in works:
            expected, before = work(), llm._client._client.recoveries
            timer = threading.Timer(0.1, lambda: os.kill(llm._engine.engines[0].child.pid, signal.SIGKILL))
            timer.start()
            found = [work()]
            while timer.is_alive() or llm._client._client.recoveries == before:
                found.append(work())
            assert all(_plain(each) == _plain(expected) for each in found)
        assert llm._client._client.recoveries == 3


def test_a_disk_that_fails_during_a_recovery_ends_no_stream_unless_the_log_is_required(tmp_path: Path, capfd) -> None:
    """Where the folder of logs was there is a file: the next engine core cannot make its own."""
    sampled = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8, seed=3)
    for required in (False, True):
        logs = tmp_path / str(required)
        with LLM(dtype="float32", threads=1, log_dir=str(logs), log_required=required, max_restarts=2) as llm:
            work = lambda: llm.generate([[5, 6, 7]], sampled, use_tqdm=False)[0].outputs[0].token_ids  # noqa: E731
            expected = work()
            logs.rename(tmp_path / f"{required}, moved")
            logs.write_text("")
            timer = threading.Timer(0.1, lambda: os.kill(llm._engine.engines[0].child.pid, signal.SIGKILL))
            timer.start()
            if required:
                with pytest.raises(EngineDead, match=f"{logs}/.* cannot be written .*--log off"):
                    [work() for _ in range(50)]
                continue
            found = [work()]
            while timer.is_alive() or not llm._client._client.recoveries:
                found.append(work())
            assert all(each == expected for each in found)
    said = capfd.readouterr().err
    assert said.count("The engine goes on without a log, until it is started again: the log directory") == 1


def _plain(answers: object) -> str:
    """Without the tokens found in the cache, which a new engine core does not have, and without names and times."""
    return re.sub(r"num_cached_tokens=\d+|request_id='\d+'|metrics=Metrics\([^)]*\)", "", json.dumps(repr(answers)))
