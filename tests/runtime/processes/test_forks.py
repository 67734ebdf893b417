"""Forks of a program with an engine: they end by themselves, harm nothing, and keep no engine alive whose owner has ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vnext.runtime.processes import forks, run_dir
from vnext.runtime.processes.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[3]
BEGIN = """
import asyncio, multiprocessing, os, sys, time
from vnext import AsyncLLM, EngineDead, LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
talk = [{"role": "user", "content": "What is Python?"}]

def in_fork(call):
    pid = os.fork()
    if not pid:
        call()
        sys.exit(3)  # in order: exit handlers and finalisers run
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@contextmanager
def program(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", BEGIN + text]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # of a session of its own: the program, its forks and engines
                os.killpg(process.pid, signal.SIGKILL)


def test_a_fork_ends_and_the_engine_goes_on(tmp_path: Path) -> None:
    """Whether it does nothing, asks, closes, leaves the block or a stream, or forgets the engine."""
    text = """
def asked():
    for call in (lambda: llm.generate("a", short), lambda: llm.embed("a"), lambda: llm.sleep(), lambda: next(llm.stream_chat(talk))):
        try:
            call()
        except EngineDead as error:
            assert f"Process {os.getppid()} has started this engine, and process {os.getpid()} is a fork of it" in str(error)
        else:
            os._exit(1)

def forgotten():
    global llm
    del llm

with LLM(executor="inproc", threads=1, log="off") as llm:
    before = llm.generate("a", short, False)[0].outputs
    stream = llm.stream_chat(talk, params)
    next(stream)
    print([in_fork(each) for each in (lambda: None, asked, llm.close, stream.close, forgotten)])
    worker = multiprocessing.get_context("fork").Process(target=asked)
    worker.start()
    worker.join()
    print(worker.exitcode, llm.generate("a", short, False)[0].outputs == before, len("".join(stream)) > 100)
print("closed")
"""
    with program(tmp_path, text) as process:
        printed, _ = process.communicate(timeout=60)
        assert printed.splitlines() == ["[3, 3, 3, 3, 3]", "0 True True", "closed"] and process.returncode == 0


def test_a_fork_of_an_async_program(tmp_path: Path) -> None:
    """It has loops of its own, as asyncio demands, and an engine only if it starts one."""
    text = """
engine = AsyncLLM(executor="inproc", threads=1, log="off")

async def last(prompt):
    return [output async for output in engine.generate(prompt, short)][-1].outputs

def asked():
    try:
        asyncio.run(last("a"))
    except EngineDead as error:
        assert "is a fork of it" in str(error)
    else:
        os._exit(1)
    with LLM(executor="inproc", threads=1, log="off") as own:
        assert own.generate("a", short, False)[0].outputs == before

before = asyncio.run(last("a"))
print(in_fork(asked), asyncio.run(last("a")) == before)
engine.close()
"""
    with program(tmp_path, text) as process:
        printed, _ = process.communicate(timeout=60)
        assert printed.split() == ["3", "True"] and process.returncode == 0


def test_an_engine_ends_with_its_owner_while_a_fork_goes_on(tmp_path: Path) -> None:
    """And the owner's run directory is free."""
    text = """
llm = LLM(executor="inproc", threads=1, log="off")
pid = os.fork()
if not pid:
    time.sleep(60)
    os._exit(0)
print(pid, llm._engine.engines[0].child.pid, llm._engine.run_dir, flush=True)
time.sleep(60)
"""
    with program(tmp_path, text) as process:
        fork, core, folder = process.stdout.readline().split()
        core_end = os.pidfd_open(int(core))
        try:
            process.kill()
            assert select.select([core_end], (), (), 20)[0], "the engine core has outlived its owner"
            os.kill(int(fork), 0)  # goes on
            run_dir._sweep(Path(folder))
            assert not Path(folder).exists()
        finally:
            os.close(core_end)


def test_descriptors_become_null_in_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork's own files, opened later, are not closed by what has been forgotten."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept, gone = RunDir(), RunDir()
    (lock,) = kept.own_descriptors
    gone.remove()
    assert gone.own_descriptors == (None,) and {kept, gone} <= set(forks._owners)
    if not (pid := os.fork()):
        status = 1
        try:
            assert os.readlink(f"/proc/self/fd/{lock}") == os.devnull and not forks._owners
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.readlink(f"/proc/self/fd/{lock}") == str(kept.path / run_dir.LOCK_NAME)
    kept.remove()
