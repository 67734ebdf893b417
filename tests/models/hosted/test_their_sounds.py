"""Towers of sounds that transformers computes: answers are its own, for any chunk, batch, hit and preemption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_here import llm_here
from their_cases import MARK, SOUND_CASES, TEMPLATE as SEEING, TEXT, VECTOR, save_words, unlike

from vnext import LLM, SamplingParams
from vnext.media.pictures import MediaError
from vnext.media.sounds import SAMPLE_RATE
from vnext.media.theirs import TheirSounds, _processor_in
from vnext.models.config.model_config import load_config, parse_config
from vnext.models.errors import ModelError
from vnext.models.loading.unread import has_tower, unread
from vnext.replay.cli.main import main as replay
from vnext.runtime.rank.their_images import TheirImages

COUNT = 6
WORDS = (MARK, "<begin>", "<end>")
TEMPLATE = SEEING.replace("'image' %}<image>", "'audio' %} <begin> <sound> <end>")
LENGTHS = (1.3, 0.9, 2.2)
SOUNDS = [np.sin(np.arange(int(seconds * SAMPLE_RATE)) ** 1.3 / 70).astype(np.float32) for seconds in LENGTHS]
OTHER = np.random.default_rng(5).uniform(-0.5, 0.5, len(SOUNDS[1])).astype(np.float32)
ASKED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "few pages": {"max_model_len": 100, "num_blocks_override": 26, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "ranks": {"tensor_parallel_size": 2},
}  # fmt: skip


def save(path: Path, key: str) -> Any:
    """Save the model of a case, with tokenizer and processor; returns it as transformers computes it."""
    case = SOUND_CASES[key]
    torch.manual_seed(1)
    config = getattr(transformers, f"{case.name}Config")(text_config=case.text, audio_token_id=VECTOR, pad_token_id=0, **case.config)
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config)
    for at, parameter in model.named_parameters():  # so that each sound is heard as another one
        torch.nn.init.normal_(parameter, std=0.6 if "conv" in at else 0.15)
    unlike(model).save_pretrained(path)
    save_words(path, WORDS, {f"audio{part}_token": word for part, word in zip(("", "_bos", "_eos"), WORDS)}, TEMPLATE)
    name, settings = case.extractor
    getattr(transformers, name)(**settings).save_pretrained(path)
    own = {"processor_class": f"{case.name}Processor"} | case.processor
    (path / "processor_config.json").write_text(json.dumps(own))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hearing")


def right(model: Any, path: Path, text: str, sound: np.ndarray) -> tuple[list[int], list[float], int]:
    """transformers' greedy answer, its log-probabilities, and the length of the prompt."""
    processor = _processor_in(path)
    given = processor(text=text, audio=[sound], sampling_rate=SAMPLE_RATE, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        found = model.generate(
            **given, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
    length = given["input_ids"].shape[1]
    answer = found.sequences[0, length:].tolist()
    return answer, [float(each[0].log_softmax(-1)[token]) for each, token in zip(found.logits, answer)], length


def answers(llm: LLM, asked: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
    prompts = [{"prompt": text, "multi_modal_data": {"audio": [(SOUNDS[at], SAMPLE_RATE) for at in which]}} for text, which in asked]
    return llm.generate(prompts, ASKED, use_tqdm=False)


@pytest.mark.parametrize("key", SOUND_CASES)
def test_answers_are_those_of_transformers(folder: Path, key: str) -> None:
    path = folder / key
    model = save(path, key)
    asked = [("d3 <sound> e4", (0,)), ("i8 <sound>", (1,)), ("<sound> f5", (2,))]
    with llm_here(path, dtype="float32", block_size=4, max_num_batched_tokens=29, max_num_seqs=3) as llm:
        found = answers(llm, asked)
        [again] = answers(llm, asked[:1])
    for answer, own in zip(found, asked):
        expected, logprobs, length = right(model, path, own[0], SOUNDS[own[1][0]])
        assert (list(answer.outputs[0].token_ids), len(answer.prompt_token_ids)) == (expected, length)
        chosen = [each[token].logprob for each, token in zip(answer.outputs[0].logprobs, expected)]
        assert chosen == pytest.approx(logprobs, rel=0, abs=1e-4)
    assert again.outputs[0].logprobs == found[0].outputs[0].logprobs and again.num_cached_tokens
    assert unread(path) == "" and has_tower(path, load_config(path))


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_a_bit(folder: Path, name: str) -> None:
    path = folder / f"glmasr {name}"
    save(path, "glmasr")
    asked = [("d3 <sound> e4", (0,)), ("i8 <sound> <sound>", (2, 1)), ("<sound> f5", (1,))]
    with llm_here(path, dtype="float32", block_size=4) as llm:
        alone = [answers(llm, [each])[0].outputs[0].logprobs for each in asked]
        [other] = llm.generate([{"prompt": asked[2][0], "multi_modal_data": {"audio": (OTHER, SAMPLE_RATE)}}], ASKED, use_tqdm=False)
    assert other.outputs[0].logprobs != alone[2]
    made = LLM if name == "ranks" else llm_here
    with made(str(path), dtype="float32", block_size=4, **SETTINGS[name]) as llm:
        assert [each.outputs[0].logprobs for each in answers(llm, asked)] == alone


def test_a_sound_in_a_conversation_is_read_as_the_template_has_it(folder: Path) -> None:
    path = folder / "talk"
    save(path, "audioflamingo3")
    parts = [{"type": "text", "text": "d3"}, {"type": "audio", "audio": (SOUNDS[1], SAMPLE_RATE)}]
    with llm_here(path, dtype="float32", block_size=4) as llm:
        [talk] = llm.chat([{"role": "user", "content": parts}], ASKED, use_tqdm=False)
        [plain] = answers(llm, [("<bos> user d3 <begin> <sound> <end> <eos>", (1,))])
    assert talk.outputs[0].logprobs == plain.outputs[0].logprobs and talk.prompt_token_ids == plain.prompt_token_ids


def test_a_log_is_run_again_by_the_vectors_that_were_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "run again"
    save(path, "moss_transcribe_diarize")
    with llm_here(path, dtype="bfloat16", log="full", log_dir=str(folder / "log"), kv_disk_dir=str(folder / "tier")) as llm:
        answers(llm, [("<sound> f5", (1,))])
        log = str(llm.log_dir)
    assert replay(["exec", log]) == 0
    assert "every token is the same" in capsys.readouterr().out


def test_what_cannot_be_heard_says_why(folder: Path) -> None:
    path = folder / "refused"
    save(path, "audioflamingo3")
    form = TheirSounds(path, (VECTOR,))
    assert form.samples == 600 * SAMPLE_RATE and form._processor.feature_extractor.dither == 0.0
    for count, sentence in ((601 * SAMPLE_RATE, "has 601.0 seconds: the model reads 600 at once"), (400, "has 0.03 seconds: the model reads longer")):
        with pytest.raises(MediaError, match=sentence):
            form.heard((np.zeros(count, np.float32), SAMPLE_RATE), "it")
    file = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(file | {"sampling_rate": 24_000}))
    with pytest.raises(MediaError, match="reads sounds at 24000 Hz, and vnext at 16000"):
        TheirSounds(path, (VECTOR,))
    for name, sentence in (("Voxtral", "names no token that stands for sounds"), ("GraniteSpeech", "hears by an adapter of its own")):
        raw = getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForConditionalGeneration"]}
        with pytest.raises(ModelError, match=sentence):
            parse_config(raw, {})


def test_a_processor_that_reads_nothing_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    """Voxtral's takes sounds in conversations alone."""
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    text, audio = TEXT | small, small | {"intermediate_size": 128, "num_mel_bins": 128}
    config = transformers.VoxtralConfig(text_config=text | {"num_key_value_heads": 1}, audio_config=audio, audio_token_id=VECTOR)
    transformers.VoxtralForConditionalGeneration(config).save_pretrained(tmp_path)
    save_words(tmp_path, ("[AUDIO]",), {}, "")
    transformers.WhisperFeatureExtractor(feature_size=128).save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "VoxtralProcessor"}))
    with pytest.raises(ModelError, match="^the model's processor cannot read sounds: .*VoxtralProcessor"):
        TheirImages(tmp_path, load_config(tmp_path), torch.float32, tmp_path)
