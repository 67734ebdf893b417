"""A model's name becomes a folder, or one sentence with the name and the remedy. No network is used."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from vnext.models.errors import ModelError
from vnext.models.loading import hub

RESPONSE = SimpleNamespace(headers={}, request=None)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./none", "~/none-such", "a/b/c", "none/"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=f"there is no folder '{name}'; give an existing folder or a hub id"):
        hub.resolve(name)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_user_without_a_home_is_told_where_to_name_a_place(says_so: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot(model: str, **_: object) -> str:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(os.path, "expanduser", lambda path: str(path))  # as for a user that the system does not know
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path) if says_so else "~/.cache/huggingface/hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    sentence = "this user has no home, so name a folder for downloaded models in HF_HOME, or give a model's folder"
    with pytest.raises(ModelError, match=f"model 'owner/name' cannot be downloaded: {sentence}$"):
        hub.resolve("owner/name")


def test_a_home_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(model: str, **_: object) -> str:
        raise PermissionError(13, "Permission denied", "/home/else/.cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match="/home/else/.cache may not be written; name a folder for downloaded models in HF_HOME"):
        hub.resolve("owner/name")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelError, match="is a file; give a GGUF file, or the folder"):
        hub.resolve(str(tmp_path / "model.bin"))


def test_a_hub_id_is_downloaded_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot(model: str, *, allow_patterns: list[str], ignore_patterns: list[str], revision: str | None) -> str:
        assert revision is None
        asked.append((model, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve("owner/name") == tmp_path
    assert asked[0][0] == "owner/name" and "*.safetensors" in asked[0][1]


def test_of_all_folders_only_that_of_the_templates_is_wanted() -> None:
    inside = "additional_chat_templates"
    here = ["config.json", "model.safetensors", "chat_template.jinja", f"{inside}/tool_use.jinja"]
    others = ["onnx/model.safetensors", "1_Pooling/config.json", "additional/x.json", f"{inside}2/x.json", f"{inside}/a/x.json"]
    names = [*here, *others, "consolidated.safetensors"]
    found = filter_repo_objects(names, allow_patterns=list(hub.WANTED_FILES), ignore_patterns=list(hub.UNWANTED_FILES))
    assert list(found) == here


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HFValidationError("bad"), "'owner/name' is neither a folder nor a valid hub id"),
        (GatedRepoError("gated", response=RESPONSE), "'owner/name' is gated; accept its terms"),
        (RepositoryNotFoundError("none", response=RESPONSE), "neither a folder nor a hub model 'owner/name'"),
        (LocalEntryNotFoundError("offline"), "no folder 'owner/name', no hub model of this name on this machine, and the hub cannot be reached"),
        (HfHubHTTPError("500", response=RESPONSE), "'owner/name' could not be downloaded"),
        (RuntimeError("the transport's own error"), "'owner/name' could not be downloaded"),
        (ConnectionError("reset"), "'owner/name' could not be downloaded"),
    ],
)
def test_each_failure_is_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=message):
        hub.resolve("owner/name")
