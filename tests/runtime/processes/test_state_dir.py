"""Where logs and overlays go for a user without a home, or with one that cannot be written: below the folder for temporary files."""

from __future__ import annotations

import logging
import os
import pwd
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vnext.commands import doctor
from vnext.commands.chat import terminal
from vnext.commands.restart import Running, listed, servers
from vnext.kernels.cuda import compiling
from vnext.options.reader import parse
from vnext.options.settings_check import engine_settings
from vnext.replay.cli.exec import _version_of
from vnext.replay.rerun.model_of_log import folder_of
from vnext.replay.rerun.numerics import CannotRun
from vnext.runtime.client.weight_update import file_of
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused, find_model, log_directory, named_models
from vnext.runtime.processes.run_dir import state_dir
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.state.events import EngineStarted

USUAL = "~/.local/state/vnext/logs"


def no_entry(uid: object) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, whose stand-in for a home it returns."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"vnext_state_{os.getuid()}"


@pytest.fixture
def homeless(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a container that runs as a user without an entry in the password file."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(pwd, "getpwnam", no_entry)
    return temporary


def test_a_home_that_can_be_written_is_used(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir(USUAL) == (tmp_path / ".local/state/vnext/logs", "")
    assert not temporary.exists() and not (tmp_path / ".local").exists()


@pytest.mark.parametrize(("data", "found"), [("{}/data", "data"), ("", ".local/share"), ("data", ".local/share")])
def test_models_lie_where_the_user_keeps_data(data: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not absolute counts for nothing there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", data.format(tmp_path))
    assert named_models("") == tmp_path / found / "vnext/models"
    assert state_dir(USUAL).path == tmp_path / ".local/state/vnext/logs"


def test_a_user_without_a_home_has_a_log_elsewhere_with_one_line(homeless: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = Path(log_directory(EngineSettings()))
    assert found.parent == homeless / "logs" and found.parent.is_dir() and homeless.stat().st_mode & 0o777 == 0o700
    said = f"The log is kept in {homeless}/logs: this user has no home. Name a folder for it with --log-dir."
    assert caplog.messages == [said]
    assert find_model(EngineSettings(override_generation_config='{"top_k": 3}')).parents[1] == homeless / "checkpoints"
    assert find_model(EngineSettings()) == DEMO_MODEL


def test_several_engines_say_it_once(homeless: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(data_parallel_size=2)
    assert [Path(log_directory(settings, replica)).parent.name for replica in (0, 1)] == ["engine-0", "engine-1"]
    assert len(caplog.messages) == 1


def test_a_home_that_cannot_be_written_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    assert state_dir(USUAL) == (temporary / "logs", "/dev/null/.local/state/vnext/logs cannot be written")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/")
    assert state_dir(USUAL) == (temporary / "logs", "/.local/state/vnext/logs cannot be written")


@pytest.mark.parametrize("settings", [EngineSettings(log_required=True), EngineSettings(log_dir="~/logs")])
def test_a_log_that_is_required_or_named_stays_where_it_is_looked_for(homeless: Path, settings: EngineSettings) -> None:
    with pytest.raises(StartRefused, match="the log directory ~/.*logs cannot be written .*home.*: choose another one"):
        log_directory(settings)


def test_a_stand_in_that_another_user_has_put_there_is_not_used(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homeless.symlink_to(homeless.parent.parent)
    with pytest.raises(StartRefused, match="cannot be written .it belongs to another user.: choose another one"):
        log_directory(EngineSettings())
    with pytest.raises(StartRefused, match="vnext_state_.* for checkpoints cannot be used"):
        find_model(EngineSettings(override_generation_config='{"top_k": 3}'))
    assert servers() == []


def test_servers_are_listed_and_chats_have_no_history(homeless: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with listed(Running(os.getpid(), "http://127.0.0.1:1", str(tmp_path))):
        assert [server.url for server in servers()] == ["http://127.0.0.1:1"]
    assert servers() == []
    assert parse(["chat"], {}).history == "" and terminal.Lines("> ", ". ", "") is not None
    assert not (tmp_path / "~").exists()


def test_a_path_below_a_home_that_is_not_there_is_refused_by_its_name(homeless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("kv_disk_dir", "packed_weights_dir", "log_dir", "cluster_secret_file"):
        with pytest.raises(SettingsError, match=f"{name} is '~/x', and there is no such user or home: write the whole path"):
            engine_settings(**{name: "~/x"})
    for flag in ("--batch-dir", "--api-key-file", "--lora-root", "--chat-template", "--ssl-certfile"):
        with pytest.raises(SystemExit):
            parse(["serve", flag, "~/x"], {})
        assert f"{flag} is '~/x', and there is no such user or home" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["~no-such-user/x", "~no-such-user"])
def test_a_path_below_a_home_that_there_is_not_is_told_in_one_sentence(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.checkpoint(path)["checkpoint"].startswith(f"{path} has no config.json")
    assert file_of(path, "") == str(Path.cwd() / path)
    assert _version_of(f"2={path}") == (2, Path(path))
    with pytest.raises(CannotRun, match=f"the log names the model '{path}', which is not here"):
        folder_of(EngineStarted(config=None, model=path, model_digest="", world_size=1, environment={}, started_ns=0), None)


def test_no_code_for_a_gpu_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiling, "compile_source", lambda *_: SimpleNamespace(cubin=b"own"))
    path = Path(os.path.expanduser("~no-such-user/cache/x.cubin"))
    monkeypatch.setattr(compiling, "cubin_path", lambda *_: path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a stranger's")
    assert compiling.cached_cubin("x.cu", (), "sm_90") == b"own" and path.read_bytes() == b"a stranger's"
