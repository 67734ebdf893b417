"""Overlays: a checkpoint's folder with members of its JSON files or its tokenizer replaced; the checkpoint itself stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from vnext import LLM, SamplingParams
from vnext.api.generation_config import sampling_defaults
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.loading.overlay import VOCABULARIES, Overrides, merged, overlay, overridden
from vnext.options.settings_check import engine_settings
from vnext.runtime.processes import launch
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused, find_model
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import SettingsError, reads_generation_config
from vnext.text.tokenizer import Tokenizer

NOTHING = Overrides({}, {})


@pytest.fixture(autouse=True)
def overlays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "OVERLAYS", str(tmp_path / "overlays"))
    return tmp_path / "overlays"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_nothing_replaced_is_the_folder_itself(overlays: Path) -> None:
    assert overlay(DEMO_MODEL, NOTHING, overlays) == DEMO_MODEL and not overlays.exists()


def test_ends_that_are_replaced_are_the_only_ones(overlays: Path) -> None:
    """The files name one, and the tokenizer."""
    assert load_config(overlay(DEMO_MODEL, Overrides({}, {"temperature": 0.5}), overlays)).eos_token_ids == (0, 4)
    assert load_config(overlay(DEMO_MODEL, Overrides({}, {"eos_token_id": 7}), overlays)).eos_token_ids == (7,)


def test_members_are_replaced_and_everything_else_stays(overlays: Path) -> None:
    before = files(DEMO_MODEL)
    found = overlay(DEMO_MODEL, Overrides({"rms_norm_eps": 0.25}, {"temperature": 0.125}), overlays)
    assert found.name == DEMO_MODEL.name and found.parent.parent == overlays
    shown = files(found)
    assert json.loads(shown.pop("config.json")) == json.loads(before["config.json"]) | {"rms_norm_eps": 0.25}
    assert json.loads(shown.pop("generation_config.json"))["temperature"] == 0.125
    assert shown == {name: data for name, data in before.items() if name not in ("config.json", "generation_config.json")}
    assert files(DEMO_MODEL) == before and load_config(found).rms_norm_eps == 0.25
    assert overlay(DEMO_MODEL, Overrides({"rms_norm_eps": 0.25}, {"temperature": 0.125}), overlays) == found
    assert overlay(DEMO_MODEL, Overrides({"rms_norm_eps": 0.5}, {}), overlays) != found
    assert {path.name for path in overlays.iterdir()} == {found.parent.name, *(path.name for path in overlays.iterdir())}


def test_folders_of_checkpoints_that_are_gone_go_too(overlays: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(DEMO_MODEL, tmp_path / "checkpoint"))
    gone = overlay(checkpoint, Overrides({"rms_norm_eps": 0.25}, {}), overlays)
    kept = overlay(DEMO_MODEL, Overrides({"rms_norm_eps": 0.25}, {}), overlays)
    assert gone.is_dir()
    shutil.rmtree(checkpoint)
    found = overlay(DEMO_MODEL, Overrides({"rms_norm_eps": 0.5}, {}), overlays)
    assert {each.name for each in overlays.iterdir()} == {kept.parent.name, found.parent.name}


def test_objects_are_merged_member_by_member() -> None:
    base = {"a": 1, "rope": {"kind": "x", "factor": 2}, "list": [1]}
    assert merged(base, {"rope": {"factor": 4}, "list": [2]}) == {"a": 1, "rope": {"kind": "x", "factor": 4}, "list": [2]}


def test_without_the_checkpoint_s_own_defaults_the_given_ones_stand_alone() -> None:
    given = engine_settings(generation_config="vllm", override_generation_config='{"top_k": 7}')
    assert reads_generation_config(given)
    defaults = sampling_defaults(find_model(given), reads_generation_config(given))
    assert defaults.sampling() == {"top_k": 7}
    assert not reads_generation_config(engine_settings(generation_config="vllm"))


def test_another_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    data = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "weights.txt").write_text("not a tokenizer's file")
    found = find_model(engine_settings(tokenizer=str(folder)))
    assert (found / "tokenizer.json").resolve() == folder / "tokenizer.json"
    assert Tokenizer.load(found).chat_template is None, "the model's own template belongs to its own tokenizer"
    assert not (found / "weights.txt").exists() and (found / "config.json").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hf_overrides": {"architectures": ["NoSuchModel"]}}, "NoSuchModel"),
        ({"hf_overrides": {"hidden_size": 0}}, None), ({"tokenizer": "/nowhere"}, "there is no folder"),
        ({"model": str(DEMO_MODEL), "revision": "main"}, "is on this machine and has no revision 'main'; leave --revision out"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(settings: dict, words: str | None) -> None:
    with pytest.raises((StartRefused, ModelError)) as error:
        load_config(find_model(engine_settings(**settings)))
    assert words is None or words in str(error.value)


@pytest.mark.parametrize("wrong", ["{", "[1]", "5", "null", {"a": {1}}])
def test_overrides_are_a_json_object(wrong: object) -> None:
    with pytest.raises(SettingsError, match="write a JSON object"):
        engine_settings(hf_overrides=wrong)


def test_an_engine_computes_with_what_is_replaced(tmp_path: Path) -> None:
    """A list of end tokens that holds every token ends each answer at once."""
    vocabulary = load_config(DEMO_MODEL).vocab_size
    ends = {"eos_token_id": list(range(vocabulary)), "temperature": 0.0}
    with LLM(executor="inproc", threads=1, log_dir=tmp_path, override_generation_config=ends) as llm:
        assert llm.get_default_sampling_params().temperature == 0.0
        params = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=4)
        [answer] = llm.generate("The", params, use_tqdm=False)
        assert (answer.outputs[0].finish_reason, answer.outputs[0].text) == ("stop", "")
        assert isinstance(params, SamplingParams)


def test_an_override_is_newer_than_the_file_in_whatever_spelling() -> None:
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert overridden(newer, {"rope_theta": 1e6})["rope_parameters"] == newer["rope_parameters"] | {"rope_theta": 1e6}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert overridden(newer, {"rope_scaling": scaling})["rope_parameters"] == scaling | {"rope_theta": 1e4}
    assert overridden(newer, {"rope_scaling": None})["rope_parameters"] == {"rope_theta": 1e4}
    two = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    found = overridden({"text_config": two}, {"rope_theta": 2e6, "rope_local_base_freq": 5e3})["text_config"]["rope_parameters"]
    assert found == {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 5e3}}
    assert overridden({"text_config": {"hidden_size": 8}}, {"hidden_size": 4})["text_config"] == {"hidden_size": 4}


def without_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO_MODEL / name)
    return folder


def test_a_checkpoint_without_any_tokenizer_is_served_by_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The answer is that of the whole checkpoint; its text is its ids, and a text may be ids."""
    params, ids = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), [5, 80, 90, 100]
    found = []
    for model in (DEMO_MODEL, without_tokenizer(tmp_path)):
        with LLM(str(model), executor="inproc", threads=1, log="off") as llm:
            found.append(llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0])
            if model != DEMO_MODEL:
                again = llm.generate("5 80 90 100", params, use_tqdm=False)[0]
                with pytest.raises(InvalidRequest, match="has no tokens for this text: send token ids"):
                    llm.generate("hello", params, use_tqdm=False)
                with pytest.raises(InvalidRequest, match="no chat template"):
                    llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
                stopped = llm.generate({"prompt_token_ids": ids}, msgspec.structs.replace(params, stop=[f" {found[0].token_ids[2]}"]), use_tqdm=False)
    assert found[1].token_ids == found[0].token_ids == again.outputs[0].token_ids and again.prompt_token_ids == ids
    assert found[1].text.split() == [str(each) for each in found[0].token_ids]
    assert stopped[0].outputs[0].text.split() == [str(each) for each in found[0].token_ids[:2]]
    assert "has no tokenizer: send token ids" in caplog.text


@pytest.mark.parametrize("name", VOCABULARIES[1:])
def test_a_vocabulary_of_another_form_is_not_passed_over(tmp_path: Path, overlays: Path, name: str) -> None:
    folder = without_tokenizer(tmp_path)
    (folder / name).write_text("{}")
    assert overlay(folder, NOTHING, overlays) == folder
    (folder / name).unlink()
    tokenizer = Tokenizer.load(overlay(folder, NOTHING, overlays))
    assert tokenizer.vocab_size == load_config(folder).vocab_size and tokenizer.encode("0 3071") == [0, 3071]
    assert tokenizer.decode([7, 12]).split() == ["7", "12"]


def test_without_a_size_of_the_vocabulary_there_is_one_sentence(tmp_path: Path, overlays: Path) -> None:
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither a tokenizer nor a vocab_size"):
        overlay(folder, NOTHING, overlays)
