"""A model and its tower in two GGUF files answer as the checkpoint that both were made of does."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from engine_here import engines_here
from gguf_writing import BYTE_LEVEL, convert, neighbours, write
from safetensors.numpy import load_file, save_file

from vnext import LLM, SamplingParams
from vnext.commands.doctor import checkpoint as checkpoint_facts
from vnext.models.config.folder import require_checkpoint
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import gguf_in
from vnext.models.gguf.header import name_map
from vnext.models.layers.sharding import alone
from vnext.models.loading.gguf_tensors import gguf_tensors, unread_gguf
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.weights import load_params
from vnext.models.registry import tower_parts
from vnext.replay.cli.main import main as replay
from vnext.runtime.processes.launch import find_model, model_folder
from vnext.runtime.protocol.settings import EngineSettings

sys.path.append(str(Path(__file__).resolve().parents[1] / "families" / "towers"))

from hearing_cases import MARK, WORDS, save_hearing  # noqa: E402  (need the path above)
from seeing_cases import CASES, GRIDS, IMAGE, TEXT as SEEING_TEXT, save_seeing  # noqa: E402
from tower_cases import SPELLED, TEXT, save_reader  # noqa: E402

PICTURES = [np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((40, 61), (32, 32))]
SOUNDS = [(np.random.default_rng(5).normal(0, 0.1, size).astype(np.float32), 16_000) for size in (9_999, 16_000)]
LANGUAGE = ("language_model.model.", "model.language_model.", "model.text_model.")
TOWERS = ("vision", "visual.", "projector", "connector", "audio_tower")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


class Kind(NamedTuple):
    """Of a family: llama.cpp's projector, the architecture of its texts, special words, what its file says besides, an image, and
    its name in CASES."""

    projector: str
    texts: str
    words: dict[str, int]
    members: dict[str, Any]
    mark: str
    case: str = ""


CLIP_PIXELS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
"""Of a checkpoint that names no other."""


def words_of(case: str) -> dict[str, int]:
    return {word: IMAGE + at for at, word in enumerate(CASES[case].words)}


PATCHES = "visual.patch_embed.proj.weight"
QWEN_MARK = "<|vision_start|> <|image_pad|> <|vision_end|>"
QWEN = {"image_min_pixels": 16**2, "image_max_pixels": 96**2, **CLIP_PIXELS}
KINDS = {
    "gemma3": Kind("gemma3", "Gemma3ForCausalLM", words_of("whole"), {"projector.scale_factor": 2}, "<start_of_image>", "whole"),
    "pixtral": Kind("pixtral", "MistralForCausalLM", words_of("rows"), {"spatial_merge_size": 2, **CLIP_PIXELS}, "[IMG]", "rows"),
    "idefics3": Kind("idefics3", "LlamaForCausalLM", SPELLED, {"projector.scale_factor": 2, "preproc_image_size": 64}, "<image>"),
    "qwen2.5": Kind("qwen2.5vl_merger", "Qwen2_5_VLForConditionalGeneration", words_of("grid"), {"n_wa_pattern": 3, "window_size": 16, **QWEN}, QWEN_MARK, "grid"),
    "qwen3": Kind("qwen3vl_merger", "Qwen3VLForConditionalGeneration", words_of("deep"), {"spatial_merge_size": 2, **QWEN}, QWEN_MARK, "deep"),
}  # fmt: skip
KINDS |= {
    "qwen2_audio": Kind("qwen2a", "Qwen2ForCausalLM", WORDS, {}, MARK, "hearing"),
    "qwen3_experts": KINDS["qwen3"]._replace(texts="Qwen3VLMoeForConditionalGeneration", case="experts"),
    "qwen3.5": KINDS["qwen3"]._replace(texts="Qwen3_5ForCausalLM", case="nets"),
}
SAVED = {"": save_reader, "hearing": save_hearing}
CHANGED = {
    "whole": {"text": {"layer_types": ["sliding_attention"] * 2}}, "grid": {"vision": {"tokens_per_second": 2}},
    "experts": {"text": {"mlp_only_layers": []}},
}  # fmt: skip
"""What of CASES no file states otherwise: each sixth of Gemma's layers sees all, and all of Qwen's layers have experts."""


@pytest.fixture(autouse=True)
def as_files_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, parts in CHANGED.items():
        own = {part: getattr(CASES[case], part) | changes for part, changes in parts.items()}
        monkeypatch.setitem(CASES, case, CASES[case]._replace(**own))


def written(folder: Path, kind: str, without: str = "", **changes: Any) -> tuple[Path, Path]:
    """A random checkpoint, and the folder of the two files that llama.cpp's converter makes of it. `changes`: members of the tower's;
    `without`: a tensor that it lacks."""
    own = KINDS[kind]
    SAVED.get(own.case, partial(save_seeing, kind=own.case))(folder / "checkpoint")
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    tensors = load_file(folder / "checkpoint" / "model.safetensors")
    tensors |= {name: numbers.astype(np.float16).astype(np.float32) for name, numbers in tensors.items() if ".conv" in name}
    save_file(tensors, folder / "checkpoint" / "model.safetensors", {"format": "pt"})
    texts, towers = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, numbers in tensors.items():
        root = next((root for root in LANGUAGE if name.startswith(root)), "")
        (towers if any(part in name for part in TOWERS) else texts)["model." * bool(root) + name.removeprefix(root).removeprefix("language_model.")] = numbers
    (folder / "texts").mkdir()
    (folder / "texts" / "config.json").write_text(json.dumps(config["text_config"] | {"architectures": [own.texts]}))
    save_file(texts, folder / "texts" / "model.safetensors")
    (folder / "files").mkdir()
    sizes = SEEING_TEXT if own.case else TEXT
    tokens = [f"t{number}" for number in range(sizes["vocab_size"])]
    for word, token in own.words.items():
        tokens[token] = word
    convert(folder / "texts", folder / "files" / "model-f32.gguf", BYTE_LEVEL | {"tokenizer.ggml.tokens": tokens})
    if own.case == "hearing":
        found = hearing_tower_of(towers)
    elif own.case in GRIDS:
        found = qwen_tower_of(towers, config["vision_config"])
    else:
        found = tower_of(towers, config["vision_config"], kind == "pixtral")
    if kind == "pixtral":
        found["v.token_embd.img_break"] = texts["model.embed_tokens.weight"][own.words["[IMG_BREAK]"]], "F32"
    found.pop(without, None)
    members = hearing_members_of(config) if own.case == "hearing" else members_of(config, own)
    write(folder / "files" / "mmproj-f32.gguf", members | changes, found)
    return folder / "checkpoint", folder / "files"


def members_of(config: dict[str, Any], own: Kind) -> dict[str, Any]:
    vision = config["vision_config"]
    found = {
        "image_size": vision["image_size"], "patch_size": vision["patch_size"], "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"], "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"], "attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-5)),
        "projection_dim": config["text_config"]["hidden_size"], "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        **own.members,
    }  # fmt: skip
    common = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.projector_type": own.projector}
    common |= {"clip.use_silu": True} if vision.get("hidden_act") == "silu" else {}
    return common | {f"clip.vision.{name}": value for name, value in found.items()}


def hearing_members_of(config: dict[str, Any]) -> dict[str, Any]:
    audio = config["audio_config"]
    found = {
        "num_mel_bins": audio["num_mel_bins"], "embedding_length": audio["d_model"], "feed_forward_length": audio["encoder_ffn_dim"],
        "block_count": audio["encoder_layers"], "attention.head_count": audio["encoder_attention_heads"],
        "attention.layer_norm_epsilon": 1e-5, "projection_dim": config["text_config"]["hidden_size"],
    }  # fmt: skip
    common = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_audio_encoder": True, "clip.projector_type": "qwen2a"}
    return common | {f"clip.audio.{name}": value for name, value in found.items()}


def hearing_tower_of(tensors: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, str]]:
    """By llama.cpp's names; biases of convolutions are columns, their weights of 16 bits."""
    names, found = name_map("clip", 4), dict[str, tuple[np.ndarray, str]]()
    for name, numbers in tensors.items():
        own = name.removeprefix("model.").replace("multi_modal_projector", "audio.multi_modal_projector")
        place = names.get_name(own, (".weight", ".bias"))
        assert place is not None, own
        is_bias = "conv" in own and numbers.ndim == 1
        found[place] = numbers[:, None] if is_bias else numbers, "F16" if "conv" in own and not is_bias else "F32"
    return found


def qwen_tower_of(tensors: dict[str, np.ndarray], vision: dict[str, Any]) -> dict[str, tuple[np.ndarray, str]]:
    """By llama.cpp's names; a patch's frames apart, as Qwen2.5-VL's queries, keys and values."""
    names, found = name_map("clip", vision["depth"]), dict[str, tuple[np.ndarray, str]]()
    for name, numbers in tensors.items():
        own = name.removeprefix("model.").replace("merger.norm", "merger.ln_q")
        own = own.replace("merger.linear_fc1", "merger.mlp.0").replace("merger.linear_fc2", "merger.mlp.2")
        if own.endswith("patch_embed.proj.weight"):
            found |= {f"v.patch_embd.weight{'.1' * frame}": (numbers[:, :, frame], "F32") for frame in range(2)}
        elif "deepstack" in own:
            *_, place, module, kind = own.split(".")
            layer = vision["deepstack_visual_indexes"][int(place)]
            found[f"v.deepstack.{layer}.{module.removeprefix('linear_')}.{kind}"] = numbers, "F32"
        else:
            apart = dict(zip("qkv", np.split(numbers, 3))) if ".qkv." in own and "window_size" in vision else {"qkv": numbers}
            for part, each in apart.items():
                place = names.get_name(own.replace(".qkv.", f".{part}."), (".weight", ".bias"))
                assert place is not None, own
                found[place] = each, "F32"
    return found


def tower_of(tensors: dict[str, np.ndarray], vision: dict[str, Any], turns: bool) -> dict[str, tuple[np.ndarray, str]]:
    """By llama.cpp's names; the norm of Gemma's projector with the 1. `turns`: whether heads turn, by neighbours there."""
    turned = vision["num_attention_heads"] if turns else 0
    names, found = name_map("clip", 4), {}
    for name, numbers in tensors.items():
        for own in ("multi_modal_projector.", "vision_tower."):  # newer checkpoints begin with model.
            name = name.removeprefix("model.") if name.startswith(f"model.{own}") else name
        if not turned and "vision_tower.vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        if turned and name.endswith(("q_proj.weight", "k_proj.weight")):
            numbers = neighbours(numbers, turned)
        place = names.get_name(name.replace("_weight", ".weight"), (".weight", ".bias"))
        assert place is not None, name
        found[place] = (numbers + np.float32("soft_emb_norm" in name), "F32")
    return found


def answered(model: Path, tokenizer: Path, kind: str) -> list[tuple[list[int], list[float]]]:
    mark, (name, inputs) = KINDS[kind].mark, ("audio", SOUNDS) if KINDS[kind].case == "hearing" else ("image", PICTURES)
    prompts = [{"prompt": f"<bos> d3 {mark} e4", "multi_modal_data": {name: [each]}} for each in inputs]
    prompts.append({"prompt": f"<bos> {mark} g6 {mark}", "multi_modal_data": {name: inputs}})
    with engines_here(), LLM(str(model), tokenizer=str(tokenizer), dtype="float32", threads=1, executor="inproc", log="off") as llm:
        outputs = [each.outputs[0] for each in llm.generate([*prompts, "<bos> d3 e4"], GREEDY, use_tqdm=False)]
    return [(list(each.token_ids), [row[token].logprob for row, token in zip(each.logprobs, each.token_ids)]) for each in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_two_files_answer_as_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Norms of Gemma and Qwen 3.5 are rounded sums in files."""
    checkpoint, files = written(tmp_path, kind)
    expected = answered(checkpoint, checkpoint, kind)
    for (tokens, logs), (wanted, theirs) in zip(answered(files, checkpoint, kind), expected, strict=True):
        assert tokens == wanted
        assert np.allclose(logs, theirs, rtol=0, atol=1e-4 if kind in ("gemma3", "qwen3.5") else 0)
    model = gguf_in(files)
    assert model == files / "model-f32.gguf"
    made = gguf_folder(model, tmp_path / "folders")
    assert checkpoint_facts(str(files))["checkpoint"] == "all of model-f32.gguf and mmproj-f32.gguf that bears on answers is read"
    one, other = (each.tower or each.sound for each in map(load_config, (made, checkpoint)))
    near = {name: pytest.approx(getattr(other, name)) for name in ("eps", "merger_eps") if hasattr(other, name)}
    assert one == msgspec.structs.replace(other, **near) and unread_gguf(made) == []
    (files / "mmproj-f32.gguf").unlink()
    bare = load_config(gguf_folder(model, tmp_path / "folders"))
    assert bare.tower is None and bare.sound is None


@pytest.mark.parametrize("kind", ("qwen2.5", "qwen3"))
def test_frames_of_a_patch_stand_in_order(kind: str, tmp_path: Path) -> None:
    """Those of an image are alike, so that its answers do not tell; parts of a tensor are read, too."""
    checkpoint, files = written(tmp_path, kind)
    stored = load_file(checkpoint / "model.safetensors")
    wanted = next(numbers for name, numbers in stored.items() if name.endswith(PATCHES))
    found = gguf_tensors(gguf_folder(files / "model-f32.gguf", tmp_path / "folders"))[PATCHES]
    part = slice(3, 40), slice(1, 2)
    assert np.array_equal(found.part(()), wanted) and np.array_equal(found.part(part), wanted[part])


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("idefics3", {"clip.vision.block_count": 2**31}, "the tower's file states 2147483648 layers and has 38 tensors; download it again"),
        ("idefics3", {"clip.vision.patch_size": 0}, "patch_size"),
        ("idefics3", {"clip.vision.image_size": "32"}, "clip.vision.image_size is '32', and one number is wanted"),
        ("idefics3", {"clip.vision.attention.head_count": 7}, "64 numbers in 7 heads"),
        ("idefics3", {"clip.vision.projector.scale_factor": 0}, "scale_factor"),
        ("idefics3", {"clip.vision.image_size": 2**20}, "position_embedding.weight"),
        ("idefics3", {"clip.vision.feed_forward_length": 2**30}, "mlp.fc1.weight"),
        ("idefics3", {"clip.use_silu": True}, "vision_config must name gelu_pytorch_tanh"),
        ("pixtral", {"clip.use_silu": False}, "hidden_act"),
        ("pixtral", {"clip.vision.spatial_merge_size": "2"}, "clip.vision.spatial_merge_size is '2', and one number is wanted"),
        ("pixtral", {"clip.vision.spatial_merge_size": 4}, "merging_layer.weight"),
        ("pixtral", {"clip.vision.attention.head_count": 7}, "64 numbers in 7 heads"),
        ("pixtral", {"clip.vision.patch_size": 2}, "patch_conv.weight"),
        ("pixtral", {"without": "v.blk.2.attn_q.weight"}, "q_proj.weight"),
        ("gemma3", {"clip.vision.patch_size": float("inf")}, "clip.vision.patch_size is inf, and a whole number is wanted"),
        ("qwen2.5", {"clip.vision.block_count": float("nan")}, "clip.vision.block_count is nan, and a whole number is wanted"),
        ("qwen2.5", {"clip.vision.n_wa_pattern": "3"}, "clip.vision.n_wa_pattern is '3', and one number is wanted"),
        ("qwen2.5", {"clip.vision.window_size": 4}, "a window hold a square"),
        ("qwen2.5", {"clip.use_silu": False}, "hidden_act"),
        ("qwen2.5", {"clip.vision.spatial_merge_size": 3}, "3 divide 128"),
        ("qwen2.5", {"without": "v.blk.1.attn_k.weight"}, "attn.k.weight"),
        ("qwen2.5", {"without": "v.patch_embd.weight.1"}, "patch_embed.proj.weight"),
        ("qwen3", {"without": "v.position_embd.weight"}, "the file has no matrix v.position_embd.weight"),
        ("qwen3", {"without": "v.deepstack.2.fc1.weight"}, "deepstack_merger_list.1.linear_fc1.weight"),
        ("qwen3", {"clip.vision.attention.head_count": 7}, "64 numbers in 7 heads"),
        ("qwen2_audio", {"clip.audio.block_count": 99}, "the tower's file states 99 layers and has"),
        ("qwen2_audio", {"clip.audio.num_mel_bins": 80}, "conv1.weight"),
        ("qwen2_audio", {"clip.audio.attention.head_count": 7}, "d_model is 64"),
        ("qwen2_audio", {"without": "mm.a.fc.bias"}, "multi_modal_projector.linear.bias"),
    ],
)
def test_broken_towers_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str) -> None:
    """Before memory is taken."""
    checkpoint, files = written(tmp_path, kind, **changes)
    with pytest.raises(ModelError, match=re.escape(sentence)):
        made = gguf_folder(files / "model-f32.gguf", tmp_path / "folders")
        require_checkpoint(made)
        config = load_config(made)
        parts = tower_parts(config.architecture)
        load_params(made, parts.config(config), alone(), torch.float32, "cpu", assemble=parts.assemble)


def test_a_tower_is_named(tmp_path: Path) -> None:
    """It may lie elsewhere, under any name; one that is not the model's is refused, as is one of a model without such files."""
    checkpoint, files = written(tmp_path / "one", "pixtral")
    _, others = written(tmp_path / "other", "idefics3")
    tower = (files / "mmproj-f32.gguf").rename(tmp_path / "tower.gguf")
    assert load_config(find_model(EngineSettings(model=str(files), tokenizer=str(checkpoint), mmproj=str(tower)))).tower is not None
    assert load_config(model_folder(str(files))).tower is None
    for wrong, sentence in (
        (others / "mmproj-f32.gguf", "mmproj-f32.gguf is not the tower of model-f32.gguf, or of a kind not read: give --mmproj another"),
        (others / "model-f32.gguf", "model-f32.gguf is not the tower of model-f32.gguf"), (tmp_path / "none", "give --mmproj the tower's GGUF file"),
    ):  # fmt: skip
        for _ in range(2):  # the second finds the folder made
            with pytest.raises(ModelError, match=re.escape(sentence)):
                model_folder(str(files), mmproj=str(wrong))
    with pytest.raises(ModelError, match="is no GGUF model, and has its tower among its own weights: leave --mmproj out"):
        model_folder(str(checkpoint), mmproj=str(tower))


def test_a_log_of_a_named_tower_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It lies elsewhere, so that the model's name in the log does not lead to it."""
    checkpoint, files = written(tmp_path, "qwen2.5")
    tower = (files / "mmproj-f32.gguf").rename(tmp_path / "tower.gguf")
    own: dict[str, Any] = {"tokenizer": str(checkpoint), "mmproj": str(tower), "log": "full", "log_dir": str(tmp_path), "kv_disk_dir": str(tmp_path / "tier")}
    with engines_here(), LLM(str(files), dtype="float32", threads=1, executor="inproc", **own) as llm:
        llm.generate([{"prompt": f"<bos> d3 {QWEN_MARK} e4", "multi_modal_data": {"image": PICTURES[:1]}}], GREEDY, use_tqdm=False)
        log = str(llm.log_dir)
    assert replay(["exec", log]) == 0, capsys.readouterr()


def test_another_models_tower_is_named_as_unread(tmp_path: Path) -> None:
    """As is one of a kind that is not read; the tower's file itself is no model."""
    changed = [("idefics3", {"clip.vision.projection_dim": 49}), ("idefics3", {"clip.projector_type": ["idefics3"]})]
    changed += [("idefics3", {"clip.projector_type": "ldp"}), ("pixtral", {"without": "mm.patch_merger.weight"})]
    for number, (kind, changes) in enumerate(changed):
        _, files = written(tmp_path / str(number), kind, **changes)
        made = gguf_folder(files / "model-f32.gguf", tmp_path / "folders")
        assert load_config(made).tower is None and "v.blk.0.attn_q.weight" in unread_gguf(made)
    with pytest.raises(ModelError, match="the file is a tower, by which a model sees or hears: name the model's own file"):
        gguf_folder(files / "mmproj-f32.gguf", tmp_path / "folders")
