"""What becomes of a sound while processes die, clients leave and others ask: answers, tenants' walls, keys, and what logs keep."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from engine_here import llm_here
from test_served_sounds import SOUND
from test_sounds import wav

from tests.e2e.serving import Server, eventually, held, serving
from tests.models.families.towers.listener_cases import SPAN, save_transcriber, sounds
from vnext import SamplingParams
from vnext.media.sounds import file_of
from vnext.media.store import digest_of
from vnext.replay.reading.source import open_log
from vnext.state.events import RequestAborted, RequestArrived, unpack_tokens
from vnext.state.store.inputs import input_tokens

SAMPLES = np.tile(np.concatenate(sounds(12, seed=8)), 5)
LONG = wav(SAMPLES[:, None], 1, 16)
"""A minute, of which each second is a window."""
PLAIN = ("--dtype", "float32", "--block-size", "4", "--threads", "1")
FIXED = {"language": "en", "stream": "true", "temperature": "0.1", "seed": "3"}
KEYS = "- {key: sk-one, name: one}\n- {key: sk-two, name: two}\n- {key: sk-few, name: few, tokens_per_minute: 70}\n"


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("towers") / "listener"
    save_transcriber(path)
    return path


def streamed(server: Server, data: bytes = LONG, key: str = "", **fields: str) -> Iterator[dict[str, str]]:
    """The events of a transcript as they come."""
    files, headers = {"file": ("a.wav", data, "audio/wav")}, {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.stream(
        "POST", f"{server.url}/v1/audio/transcriptions", data=FIXED | fields, files=files, headers=headers, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def text_of(events: Iterator[dict[str, str]]) -> str:
    *deltas, done = events
    assert done["type"] == "transcript.text.done" and "".join(each["delta"] for each in deltas) == done["text"], done
    return done["text"]


def test_a_transcript_survives_killed_processes(listener: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(listener), *PLAIN, "--no-enable-prefix-caching") as server:
        calm = text_of(streamed(server))
        for module in ("vnext.runtime.rank.main", "vnext.runtime.engine.main"):
            events = streamed(server)
            first = [next(events) for _ in range(4)]
            before = server.process_of(module).pid
            os.kill(before, signal.SIGKILL)
            assert text_of(iter([*first, *events])) == calm, module
            assert server.process_of(module).pid != before


def test_who_leaves_is_heard_no_further(listener: Path, tmp_path: Path) -> None:
    """Neither in the window that is being heard, in which the rank is stopped until the client has left, nor in those behind it."""

    async def begin_and_leave() -> None:
        files = {"file": ("a.wav", LONG, "audio/wav")}
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asked = asyncio.create_task(client.post("/v1/audio/transcriptions", data=FIXED, files=files))
            assert await asyncio.to_thread(eventually, lambda: server.metric("vnext_num_requests_running") == 1)
            asked.cancel()
            await asyncio.wait([asked])

    with serving(tmp_path, str(listener), *PLAIN, "--log", "full") as server:
        with held(server):
            asyncio.run(begin_and_leave())
        assert eventually(lambda: server.metric("vnext_num_requests_running") == server.metric("vnext_num_requests_waiting") == 0)
        assert text_of(streamed(server, SOUND))
        server.stop()
        found = [event for item in open_log(server.log_dir).items() for event in getattr(item, "events", ())]
    assert sum(isinstance(event, RequestArrived) for event in found) <= 3 and any(isinstance(event, RequestAborted) for event in found)


def test_a_tenant_has_its_own_cache_and_budget_of_sounds(listener: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    with serving(tmp_path / "logs", str(listener), *PLAIN, "--api-key-file", str(tmp_path / "keys.yaml")) as server:

        def hits(key: str) -> float:
            """Of one sound, once the figures tell of it."""
            before, asked = (server.metric(f"vnext_prefix_cache_{each}_total") for each in ("hits", "queries"))
            text_of(streamed(server, SOUND, key))
            assert eventually(lambda: server.metric("vnext_prefix_cache_queries_total") > asked)
            assert eventually(lambda: server.metric("vnext_num_requests_running") == 0)
            return server.metric("vnext_prefix_cache_hits_total") - before

        assert hits("sk-one") == 0 and hits("sk-one") >= SPAN and hits("sk-two") == 0
        text_of(streamed(server, SOUND, "sk-few"))
        refused = httpx.post(
            f"{server.url}/v1/audio/transcriptions", files={"file": SOUND}, headers={"Authorization": "Bearer sk-few"}, timeout=60
        )
        assert refused.status_code == 429 and "Retry-After" in refused.headers, refused.text
        assert httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": SOUND}).status_code == 401


@pytest.mark.parametrize("kept", ["shape", "full", "off"])
def test_no_log_keeps_samples_and_nothing_does_once_the_server_is_gone(listener: Path, tmp_path: Path, kept: str) -> None:
    """A log of shapes has neither a sound's name nor the tokens around it."""
    noise = np.random.default_rng(4).integers(-32768, 32768, 16_000).astype("<i2")
    data = SOUND[: SOUND.index(b"data") + 8] + noise.tobytes()
    with serving(tmp_path, str(listener), *PLAIN, "--log", kept) as server:
        assert text_of(streamed(server, data, prompt="d3 e4 f5")) is not None
        folders = {Path(each.laddr).parent for one in server.processes for each in one.net_connections("unix") if each.laddr}
        [media] = [folder / "media" for folder in folders if (folder / "media").is_dir()]
        assert [len(path.read_bytes()) for path in media.iterdir()] == [len(b"sound\0") + 64_000]
        server.stop()
        found = [] if kept == "off" else [event for item in open_log(server.log_dir).items() for event in getattr(item, "events", ())]
    assert not media.exists()
    heard = (noise / 2.0**15).astype(np.float32)
    named = input_tokens(digest_of(file_of(heard)), SPAN).tolist()
    arrived = [(unpack_tokens(event.prompt).tolist(), event.sampling) for event in found if isinstance(event, RequestArrived)]
    assert bool(arrived) == (kept != "off")
    for prompt, sampling in arrived:
        assert (prompt[:SPAN] == named, sampling.constraint is not None) == ((kept == "full"),) * 2 and len(prompt) > SPAN
        assert kept == "full" or not {*named, 3, 4, 31} & {*prompt}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(each[at : at + 64].tobytes() in file for file in files for each in (noise, heard) for at in (0, 8_000))


def test_several_answers_to_a_sound_are_those_of_each_alone(listener: Path) -> None:
    """And the sound is computed once."""
    prompt = {"prompt": "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", "multi_modal_data": {"audio": SOUND}}
    with llm_here(listener, dtype="float32", block_size=4) as llm:
        [several] = llm.generate(prompt, SamplingParams(n=4, seed=5, temperature=1.0, max_tokens=12))
        [fewer] = llm.generate(prompt, SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=12))
    found = [each.token_ids for each in several.outputs]
    assert len({*map(tuple, found)}) > 1 and [each.token_ids for each in fewer.outputs] == found[:2]
