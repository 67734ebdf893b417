"""The systemd unit and the container file: what can be judged of them without systemd and without a builder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.commands.api_servers import GRACE_S
from vnext.commands.production import FILES_MIN, PROCESSES_MIN
from vnext.gateway.run import CLEANUP_TIMEOUT_S
from vnext.options.reader import DoctorCommand, RouterCommand, ServeCommand, parse
from vnext.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
PROGRAM = "/opt/vnext/bin/vnext"
INSTRUCTIONS = {
    "ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
}  # fmt: skip


def unit(name: str = "vnext.service") -> dict[str, list[str]]:
    """A unit's assignments by name."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text().splitlines():
        if re.match(r"\w+=", line):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """The container file's instructions, with their lines joined."""
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("name", "commands"), [("vnext.service", 2), ("vnext-router.service", 1)])
def test_systemd_finds_nothing_in_the_unit(name: str, commands: int, tmp_path: Path) -> None:
    text = (DEPLOY / name).read_text()
    assert text.count(PROGRAM) == commands
    (tmp_path / name).write_text(text.replace(PROGRAM, shutil.which("true")))
    ran = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_commands_of_the_unit_are_ours(tmp_path: Path) -> None:
    found = unit()
    check, serve = (shlex.split(found[name][0].removeprefix("-")) for name in ("ExecStartPre", "ExecStart"))
    assert check[0] == serve[0] == PROGRAM
    assert isinstance(parse(check[1:], {}), DoctorCommand)
    (tmp_path / "config.yaml").write_text("model: /models/a\nlog-keep: 10\n")
    command = parse([str(tmp_path / "config.yaml") if word == "/etc/vnext/config.yaml" else word for word in serve[1:]], {})
    assert isinstance(command, ServeCommand) and command.engine.log_format == "json" and command.engine.log_keep == 10


def test_the_command_of_the_routers_unit_is_ours(tmp_path: Path) -> None:
    found = unit("vnext-router.service")
    command = shlex.split(found["ExecStart"][0])
    (tmp_path / "router.yaml").write_text("backend: [http://10.0.0.1:8000, http://10.0.0.2:8000]\nhost: 0.0.0.0\n")
    words = [str(tmp_path / "router.yaml") if word == "/etc/vnext/router.yaml" else word for word in command[1:]]
    router = parse(words, {"VNEXT_API_KEY": "sk-1", "VNEXT_ADMIN_KEY": "sk-2", "VNEXT_BACKEND_API_KEY": "sk-3"})
    assert isinstance(router, RouterCommand) and len(router.settings.backends) == 2
    http = router.settings.http
    assert (http.api_keys, http.host, http.log_format, router.settings.admin_key) == (("sk-1",), "0.0.0.0", "json", "sk-2")
    assert int(found["TimeoutStopSec"][0]) > http.drain_s + CLEANUP_TIMEOUT_S


def test_the_unit_gives_what_the_checks_ask_for() -> None:
    found = unit()
    assert int(found["LimitNOFILE"][0]) >= FILES_MIN and int(found["TasksMax"][0]) >= PROCESSES_MIN
    assert int(found["TimeoutStopSec"][0]) > ServerSettings().drain_s + 2 * GRACE_S
    assert found["RestartPreventExitStatus"] == ["2"] and found["OOMPolicy"] == ["continue"]


def test_the_container_file_has_known_instructions_and_copies_what_is_there() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "ARG" and found[-1][0] == "ENTRYPOINT"
    for name, rest in found:
        if name == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest], capture_output=True).returncode == 0, rest


def test_the_container_serves_with_its_variables() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["vnext", "serve"]
    environment = dict(pair.split("=", 1) for pair in found["ENV"].split())
    command = parse([*json.loads(found["ENTRYPOINT"])[1:], "--model", "/models/a"], environment)
    assert isinstance(command, ServeCommand) and (command.server.host, command.engine.log_keep) == ("0.0.0.0", 10)
    volumes = found["VOLUME"].split()
    assert str(command.server.port) == found["EXPOSE"] and [command.engine.log_dir, environment["HF_HOME"]] == volumes
    user = next(rest for name, rest in instructions() if name == "RUN" and "useradd" in rest)
    assert all(f" {volume}" in user.partition("chown")[2] for volume in volumes), "a new volume takes its owner from the image"
    assert re.findall(r"--uid (\d+)", user) * 2 == found["USER"].split(":"), "Kubernetes asks for a number"
    probe = json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])
    assert probe[:2] == ["python", "-c"] and f":{command.server.port}/live'" in probe[2] and compile(probe[2], "probe", "exec")


def test_the_copied_files_are_enough_to_build_from(tmp_path: Path) -> None:
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                place = tmp_path / target if (ROOT / source).is_dir() else tmp_path / source
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
    ran = subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "opentelemetry-sdk" in (tmp_path / "vnext.egg-info" / "requires.txt").read_text()
    listed = (tmp_path / "vnext.egg-info" / "SOURCES.txt").read_text()
    assert "vnext/server/run.py" in listed and "vnext/runtime/transport/ring/_ring.c" in listed
