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


@pytest.mark.parametrize("name", ["model.gguf", "two words.GGUF", "folder/model.gguf", "a/b/c/model.gguf"])
def test_a_gguf_file_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=f"^there is no file '{name}'; give an existing GGUF file, a folder or a hub id"):
        hub.resolve(name)


@pytest.mark.parametrize("name", ["", "config.json", "model-00002-of-00002.safetensors", "m.gguf"])
def test_what_this_user_may_not_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / (name or "config.json")).write_text("{}")
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert hub.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / name)  # root may read all
    with pytest.raises(ModelError, match=f"^{tmp_path / name} may not be read by this user; change its owner or its permissions$"):
        hub.resolve(str(tmp_path))
    if name == "m.gguf":
        with pytest.raises(ModelError, match="may not be read by this user"):
            hub.resolve(str(tmp_path / name))


def test_a_url_is_not_a_model() -> None:
    with pytest.raises(ModelError, match="^'https://x.example/a/b.gguf' is a URL; download the file and give its path"):
        hub.resolve("https://x.example/a/b.gguf")


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-b179c9523d0e", "model.gguf.txt"])
def test_a_gguf_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / name).symlink_to("blob")
    assert hub.resolve(str(tmp_path / name)) == tmp_path / name


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelError, match="is a file; give a GGUF file, or the folder"):
        hub.resolve(str(tmp_path / "model.bin"))


def test_a_hub_id_is_downloaded_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    (tmp_path / "config.json").write_text("{}")

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


FILES = [
    "README.md", "mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf", "m-UD-Q4_K_XL.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]), ("q8_0", ["m.Q8_0.gguf"]), ("m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]), ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("BF16", FILES[5:7]), ("BF16/m-BF16-00001-of-00002.gguf", FILES[5:7]),
    ],
)  # fmt: skip
def test_a_quantisation_chooses_a_file(wanted: str, found: list[str]) -> None:
    assert hub.gguf_files("o/n", FILES, wanted) == found


@pytest.mark.parametrize(
    ("names", "wanted", "words"),
    [
        (FILES, "Q4_K", "'o/n' has no GGUF files named 'Q4_K'; name one behind a colon: BF16/m-BF16-00001-of-00002.gguf, m-Q4_K_M"),
        (FILES, "", "'o/n' has 5 GGUF files; name one behind a colon: "),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "2 GGUF files named 'Q4_0'; name one behind a colon: a-Q4_0.gguf, b-Q4_0.gguf$"),
        (["README.md"], "Q4_0", "has neither config.json nor a GGUF file; name another one"),
    ],
)
def test_no_single_file_is_meant(names: list[str], wanted: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        hub.gguf_files("o/n", names, wanted)


@pytest.mark.parametrize("is_online", [True, False])
@pytest.mark.parametrize("model", ["owner/name:Q8_0", "owner/other"])
def test_gguf_of_the_hub(model: str, is_online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By quantisation, or the only one of a repository without config.json; what is in the cache serves without the hub. With the tower."""
    wanted: list[object] = []

    def snapshot(model: str, **options: object) -> str:
        wanted.append(options.get("allow_patterns"))
        return str(tmp_path)

    def info(self: object, model: str, revision: str | None) -> SimpleNamespace:
        if not is_online:
            raise ConnectionError("no network")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    names = ("README.md", "m-Q8_0.gguf", "other/mmproj-A.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    assert hub.resolve(model) == tmp_path / "m-Q8_0.gguf"
    assert wanted[-1] == ["m-Q8_0.gguf", "mmproj-BF16.gguf"]
