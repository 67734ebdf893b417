"""Tests of the command line: version, imports, the curl line and `vnext doctor`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from vnext.base import compiled
from vnext.base.version import __version__
from vnext.commands.cli import main
from vnext.commands.doctor import examine, show, warnings
from vnext.commands.machine import machine
from vnext.commands.serve import say_unused, usual_names
from vnext.options.foreign import FOREIGN
from vnext.options.parser import Parser
from vnext.options.reader import parse
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.console import curl_line

STANDARD = {name.strip("_") for name in sys.stdlib_module_names} | {"cython_runtime"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vnext {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "place", "words"),
    [(["doctor"], "vnext.commands.doctor.examine", "vnext: interrupted"), (["pull", "m"], "vnext.commands.models.resolve", "vnext pull: stopped."),
     (["quantize", "m", "out"], "vnext.commands.quantize._squares", "vnext quantize: stopped; nothing is left behind."),
     (["batch", "-i", "in", "-o", "out"], "vnext.commands.batch._unusable", "vnext: interrupted")],
)  # fmt: skip
def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv, place, words) -> None:
    monkeypatch.setattr(place, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert main(argv) == 130
    said = capsys.readouterr()
    assert said.err == f"{words}\n" and not said.out


def test_the_package_is_the_command(root: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "vnext", "--version"], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == f"vnext {__version__}\n" and not run.stderr


LOADED = "import json, sys; before = set(sys.modules); import {}; print(json.dumps(sorted(set(sys.modules) - before)))"


@pytest.mark.parametrize(
    ("module", "packages", "rooms"),
    [
        (
            "vnext.commands.cli",
            {"msgspec", "typing_extensions"},
            {"base", "commands", "gateway", "kernels", "options", "routing", "runtime", "sched", "server", "state"},
        ),
        (
            "vnext.commands.bench.cli",
            {"msgspec", "typing_extensions"},
            {"base", "commands", "gateway", "kernels", "options", "routing", "runtime", "sched", "server", "state"},
        ),
        ("vnext.sched.schedule", {"msgspec", "numpy", "typing_extensions", "xxhash"}, {"base", "sched", "state"}),
    ],
)
def test_a_light_module_loads_little(root: Path, module: str, packages: set[str], rooms: set[str]) -> None:
    """The command lines need no more for --help, and the scheduler is imported by every process."""
    ran = subprocess.run([sys.executable, "-c", LOADED.format(module)], cwd=root, check=True, stdout=subprocess.PIPE)
    loaded = [name.split(".") for name in json.loads(ran.stdout)]
    assert {name[0] for name in loaded if name[0].strip("_") not in STANDARD} - {"vnext"} <= packages
    folders = {path.name for path in (root / "vnext").iterdir() if path.is_dir()}
    assert {name[1] for name in loaded if name[0] == "vnext" and len(name) > 1} & folders <= rooms


def test_other_engines_options_cost_only_who_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    added, add = [], Parser.add_argument
    monkeypatch.setattr(Parser, "add_argument", lambda self, *names, **given: added.extend(names) or add(self, *names, **given))
    parse(["serve", "--swap-space", "4", "--no-trust-remote-code", "-tp=1"])
    assert {name for name in added if name in FOREIGN} == {"--swap-space", "--trust-remote-code"}
    assert added.count("model") == 1, "other commands cost nothing either"


def test_doctor_names_machine_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["vnext"] == __version__
    assert report["machine"]["cores_usable"] >= 1
    assert report["machine"]["memory_bytes"] > report["machine"]["memory_available_bytes"] > 0
    assert {"operation", "device_type", "implementation", "summary"} == set(report["kernels"][0])
    assert report["compiled"].keys() == set(compiled.MODULES)
    assert {"device", "kernels", "graphs"} <= set(report["cuda"])
    assert set(report["batch_invariant"]) == {"float32", "bfloat16", "float16"}
    assert main(["doctor"]) == 0
    short = capsys.readouterr().out
    assert report["machine"]["cpu_model"].split()[0] in short and "`vnext doctor --verbose` lists them" in " ".join(short.split())
    assert "paged_attention" not in short and "CUDA: device" not in short and len(short.splitlines()) < 60
    assert main(["doctor", "--verbose"]) == 0
    long = capsys.readouterr().out
    assert long.count("paged_attention") > 1 and "CUDA: device" in long and "(cuda)" not in short


def test_doctor_looks_at_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(folder: Path) -> str:
        assert main(["doctor", "--json", "--model", str(folder)]) == 0
        return str(json.loads(capsys.readouterr().out)["checkpoint"])

    assert said(DEMO_MODEL) == f"all of {DEMO_MODEL} that bears on answers is read"
    assert said(tmp_path).startswith(f"{tmp_path} has no config.json;")
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"logit_scale": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert said(tmp_path / "model").endswith("members of config.json logit_scale.")
    show(examine() | {"checkpoint": "all of it is read"}, Console(width=300))
    assert "all of it is read" in capsys.readouterr().out


def test_doctor_says_which_modules_are_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "absent", {"vnext.log._log": compiled.NOT_BUILT})
    monkeypatch.setattr(compiled, "load", lambda name: None if name == "vnext.log._log" else compiled)
    console = Console(width=300)
    show(examine(), console)
    said = " ".join(capsys.readouterr().out.split())
    assert "plain: log._log not built: no compiler, or no headers of Python, was found" in said
    assert "compiled state.store._columns, state.store._prefix_index, log._open_blocks" in said


def test_doctor_warns_of_what_will_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "leftovers", list)
    well = msgspec.structs.replace(
        machine(), load=(0.0, 0.0, 0.0), shm_available_bytes=2**34, memory_available_bytes=2**34
    )
    assert warnings(well, gpu_count=0) == []
    (shm,) = warnings(msgspec.structs.replace(well, shm_available_bytes=64 * 2**20), gpu_count=0)
    assert "64 MiB free" in shm and "--shm-size" in shm
    (memory,) = warnings(msgspec.structs.replace(well, memory_available_bytes=2**30), gpu_count=0)
    assert "1.0 GiB of memory" in memory
    monkeypatch.setattr(compiled, "leftovers", lambda: [Path("/here/old.so")])
    (leftover,) = warnings(well, gpu_count=0)
    assert leftover == "Modules of an earlier build lie where none is loaded: rm /here/old.so"
    monkeypatch.setattr(compiled, "leftovers", list)
    (gpu,) = warnings(well, gpu_count=1)
    assert "vnext runs on the CPU: this torch was built without CUDA" in gpu or "torch finds no GPU" in gpu


@pytest.mark.parametrize(("chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_curl_line_is_a_shell_command(chat: bool, path: str) -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8123", chat=chat, has_key=False))
    assert words[:3] == ["curl", "-s", f"http://127.0.0.1:8123{path}"]
    assert json.loads(words[words.index("-d") + 1])["max_tokens"] > 0
    assert "Authorization" not in " ".join(words)


def test_curl_line_never_shows_the_key() -> None:
    assert "$VNEXT_API_KEY" in curl_line("http://host", chat=True, has_key=True)


def test_options_for_a_gpu_are_named_where_the_cpu_computes(capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineSettings(gpu_memory_utilization=0.8, enforce_eager=True)
    say_unused(engine, {"device": "cpu"})
    assert capsys.readouterr().out.splitlines() == [
        "vnext: ignored: --gpu-memory-utilization (the model is computed on the CPU, see --device)",
        "vnext: ignored: --enforce-eager (the model is computed on the CPU, see --device)",
    ]
    say_unused(engine, {"device": "NVIDIA H200"})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("model", "folder", "names"),
    [
        ("", "/site/vnext/demo_model", ("demo_model",)),
        ("models/tiny", "models/tiny", ("tiny", "models/tiny")),
        ("./models/tiny/", "models/tiny", ("tiny", "./models/tiny/")),
        ("owner/name", "/cache/snapshots/5f0b02c7", ("owner/name",)),
    ],
)
def test_requests_may_call_a_model_as_it_was_given(
    model: str, folder: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert usual_names(model, Path(folder)) == names


def test_the_working_folder_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert usual_names(".", Path(".")) == (tmp_path.name, ".")


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("write", ["write_line", "write_error"])
def test_a_server_goes_on_when_nobody_reads_what_it_says(root: Path, write: str, is_open: bool) -> None:
    """Its reader has gone, or reads nothing of a pipe that holds 64 KiB."""
    reader, writer = os.pipe()
    if not is_open:
        os.close(reader)
    code = f"import os; from vnext.server.console import {write} as write\nfor _ in range(300): write('word ' * 100)\nos._exit(7)"
    streams = {"stdout": writer, "stderr": writer} | {"stdout" if write == "write_error" else "stderr": subprocess.PIPE}
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, text=True, timeout=60, **streams)
    os.close(writer)
    assert (ran.returncode, ran.stdout or "", ran.stderr or "") == (7, "", "")
    if is_open:
        lines = os.read(reader, 2**20).decode().splitlines()
        os.close(reader)
        assert len(lines) > 100 and set(lines[:-1]) == {"word " * 100}
