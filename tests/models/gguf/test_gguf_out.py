"""GGUF files that `vnext quantize` writes: the numbers, the configuration and the tokenizer of what they were made from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import tokenizers
from family_cases import CASES, save_case
from hybrids import CASES as HYBRIDS, save_hybrid
from test_gguf_families import FORMS
from test_gguf_tokenizer import lines
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from perf.peers.files import token_bytes_of
from vnext.commands.cli import main
from vnext.kernels.formats.gguf_blocks import BLOCKS
from vnext.kernels.formats.gguf_rounding import SEARCHED, to_blocks
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.header import read_header
from vnext.models.gguf.tokenizer import CUTS, SPACE, Vocabulary
from vnext.models.gguf.vocabulary_out import Ends, cut_name, vocabulary_members
from vnext.models.loading.checkpoint import Checkpoint, open_checkpoint
from vnext.models.loading.gguf_members import ARCHITECTURES
from vnext.models.loading.gguf_mixtures import Mixture
from vnext.models.loading.gguf_out import GgufQuantiser
from vnext.models.loading.overlay import gguf_folder
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.text.files import chat_templates

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]}
READ_ONLY = ("mistral",)  # its window stands in files of mistral3 alone, as which no model is written
FAMILIES = [name for name, case in FORMS.items() if case.architecture in ARCHITECTURES and name not in READ_ONLY] + ["granite_hybrid"]
RECURRENT = ("qwen3_5", "qwen3_5_wide", "lfm2", "granite_h", "granite_h_moe")
TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def saved(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **changes: object) -> Path:
    """A random checkpoint with the demo model's tokenizer."""
    if name in RECURRENT:
        architecture, config, own = HYBRIDS[name]
        monkeypatch.setitem(HYBRIDS, name, (architecture, config, {**own, **SIZES, **changes}))
        save_hybrid(folder, name)
    else:
        case = FORMS[name] if name in FORMS else CASES[name]
        monkeypatch.setitem(CASES, name, case._replace(changes={**case.changes, **SIZES, **changes}))
        save_case(folder, name)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / each, folder)
    return folder


def written(source: Path, out: Path, scheme: str, templates: Mapping[str, str] | None = None) -> dict[str, float]:
    """The losses by tensors of the file."""
    return {loss.name: loss.share for loss in GgufQuantiser(source, out, scheme, templates or {}).run()}


@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT])
def test_a_checkpoint_is_read_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the family reads, rounded to bfloat16; and the same configuration but for names."""
    folder = saved(tmp_path / "checkpoint", name, monkeypatch)
    losses = written(folder, tmp_path / "model.gguf", "bf16")
    found = gguf_folder(tmp_path / "model.gguf", tmp_path / "folders")
    with open_checkpoint(folder) as plain, open_checkpoint(found) as again:
        names = set(plain.names()) - ({"lm_head.weight"} if load_config(folder).tie_embeddings else set())
        homes = {each: joined(each, set(again.names())) for each in names}
        assert {part for parts in homes.values() for part in parts} == set(again.names()) and max(losses.values()) < 0.003
        for each, parts in homes.items():
            own, new = whole(plain, each), np.concatenate([whole(again, part) for part in parts])
            if "gate_up_proj" in parts[0] and "gate_up_proj" not in each:
                new = np.split(new, 2)["up_proj" in each]
            assert np.allclose(own, new, rtol=2**-8, atol=0) and new.shape == own.shape, each
    one, other = (load_config(path) for path in (folder, found))
    differ = {name for name in one.__struct_fields__ if not alike(getattr(one, name), getattr(other, name))}
    own_name = {"architecture"} if name == "granite_hybrid" else set()  # whose layers all attend: Granite 3 then
    assert differ <= {"dtype", "eos_token_ids", "bos_token_id", *own_name}


def joined(name: str, there: set[str]) -> list[str]:
    """The tensors that a file has in the place of one: of Granite's MLP gate and up, or down; of Gemma 4's experts gate and up."""
    if ".experts." in name and (both := re.sub("(gate|up)_proj", "gate_up_proj", name)) in there:
        return [both]
    here, _, own = name.partition("shared_mlp.")
    parts = {"input_linear.weight": ("gate_proj", "up_proj"), "output_linear.weight": ("down_proj",)}.get(own, ())
    inner = "mlp.shared_expert." if any("shared_expert" in each for each in there) else "mlp."
    return [f"{here}{inner}{part}.weight" for part in parts] or [name]


def whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    shape = checkpoint.shape(name)
    assert shape is not None
    return checkpoint.part(name, shape, ()).astype(np.float32)


def alike(one: object, other: object) -> bool:
    """Equal, but for floats as files round them."""
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        return all(alike(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return one == pytest.approx(other) if isinstance(one, float) and isinstance(other, float) else one == other


def test_few_bits_leave_the_head_eight_and_vectors_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "checkpoint", "qwen2", monkeypatch, tie_word_embeddings=False, intermediate_size=112)
    losses = written(folder, tmp_path / "model.gguf", "q4_0")
    types = {name: each.type for name, each in read_header(tmp_path / "model.gguf").tensors.items()}
    assert {types["token_embd.weight"], types["output.weight"]} == {"Q8_0"}
    assert {types["blk.1.attn_q.bias"], types["blk.1.attn_norm.weight"]} == {"F32"}
    assert types["blk.0.ffn_down.weight"] == "F16", "112 inputs are no whole blocks"
    assert types["blk.0.ffn_up.weight"] == "Q4_0" and 0.02 < losses["blk.0.ffn_up.weight"] < 0.1


def test_experts_alone_become_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp has such files; a decoded token reads half of six experts, and of a table that is no head a row."""
    written(saved(tmp_path / "checkpoint", "gpt_oss", monkeypatch), file := tmp_path / "model.gguf", "mxfp4")
    tensors = read_header(file).tensors
    assert {tensors[f"blk.0.ffn_{part}_exps.weight"].type for part in ("gate", "up", "down")} == {"MXFP4"}
    assert {tensors[name].type for name in ("blk.0.attn_q.weight", "output.weight")} == {"Q8_0"}
    assert {tensors[f"blk.0.{name}"].type for name in ("ffn_gate_inp.weight", "attn_sinks.weight", "ffn_up_exps.bias")} == {"F32"}
    sizes = {name: each.stop - each.start for name, each in tensors.items()}
    whole, table = sum(sizes.values()), sizes["token_embd.weight"]
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    assert token_bytes_of(file) == whole - experts // 2 - table + table // SIZES["vocab_size"]


WIDE, SECOND = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31], [0, 1]
K_MIXTURES = {
    "Q2_K": ("Q2_K", "Q4_K", [], "Q3_K", [], "Q3_K"), "Q3_K_M": ("Q3_K", "Q5_K", SECOND, "Q5_K", SECOND, "Q4_K"),
    "Q4_K_M": ("Q4_K", "Q6_K", WIDE, "Q6_K", WIDE, "Q4_K"), "Q5_K_M": ("Q5_K", "Q6_K", WIDE, "Q6_K", WIDE, "Q5_K"),
    "Q6_K": ("Q6_K", "Q6_K", [], "Q6_K", [], "Q6_K"),
}  # fmt: skip
"""Of a scheme's matrices: the type of most, of values and of which layers', of the MLP's last and of which layers', of outputs."""


@pytest.mark.parametrize("scheme", K_MIXTURES)
def test_k_mixtures_are_llama_cpps(scheme: str) -> None:
    """Those of its files of a Llama of 32 layers; rows of 288 get other blocks; eight experts, more bits for attention."""
    parts = {"attn_q": 4096, "attn_k": 4096, "attn_v": 1024, "attn_output": 4096, "ffn_up": 4096, "ffn_down": 14336, "attn_norm": 0}
    shapes = {f"blk.{layer}.{part}.weight": (1024, size) if size else (4096,) for layer in range(32) for part, size in parts.items()}
    shapes |= {f"blk.{layer}.attn_v.weight": (256, 4096) for layer in range(32)} | {"token_embd.weight": (9, 4096)}
    tied, untied = (Mixture(scheme, shapes | more, 0) for more in ({}, {"output.weight": (9, 4096)}))
    most, values, of_values, last, of_last, outputs = K_MIXTURES[scheme]

    def types(mixture: Mixture, part: str) -> list[str]:
        return [mixture.type_of(f"blk.{layer}.{part}.weight") for layer in range(32)]

    others = {"Q3_K_M": "Q4_K", "Q2_K": values}.get(scheme, most)
    assert types(tied, "attn_v") == [values if layer in of_values else others for layer in range(32)]
    others = {"Q3_K_M": "Q4_K", "Q2_K": last}.get(scheme, most)
    assert types(tied, "ffn_down") == [last if layer in of_last else others for layer in range(32)]
    assert {*types(tied, "attn_q"), *types(tied, "ffn_up")} == {most} and {*types(tied, "attn_output")} == {outputs}
    assert {*types(tied, "attn_norm")} == {"F32"} and tied.type_of("token_embd.weight") == "Q6_K"
    assert (untied.type_of("token_embd.weight"), untied.type_of("output.weight")) == (most, "Q6_K")
    narrow = Mixture(scheme, {"blk.0.ffn_up.weight": (64, 288), "blk.0.ffn_gate.weight": (64, 100)}, 0)
    small = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}[most]
    assert [narrow.type_of(f"blk.0.ffn_{part}.weight") for part in ("up", "gate")] == [small, "F16"]
    eight = Mixture(scheme, shapes, 8)
    assert {*types(eight, "attn_v"), *types(eight, "attn_k")} == {"Q8_0"}
    assert {*types(eight, "attn_output")} == {"Q6_K" if scheme == "Q6_K" else "Q5_K"}


def test_a_k_mixture_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint, and from a file that is of another type."""
    folder = saved(tmp_path / "checkpoint", "llama31", monkeypatch, hidden_size=256, intermediate_size=256)
    first = written(folder, tmp_path / "first.gguf", "bf16") and written(tmp_path / "first.gguf", tmp_path / "second.gguf", "q4_k_m")
    losses = written(folder, tmp_path / "third.gguf", "q4_k_m")
    one, other = (read_header(tmp_path / f"{name}.gguf") for name in ("second", "third"))
    types = {name: each.type for name, each in other.tensors.items()}
    assert types == {name: each.type for name, each in one.tensors.items()} and {"Q4_K", "Q6_K"} < set(types.values())
    assert one.metadata["general.file_type"] == other.metadata["general.file_type"] == 15
    for name, share in losses.items():
        assert share == pytest.approx(first[name], rel=0.01) and share < {"Q4_K": 0.08, "Q6_K": 0.02}[types[name]]
    with open_checkpoint(folder) as plain:
        own = whole(plain, "model.layers.1.mlp.up_proj.weight")
    [again] = [each for each in gguf.GGUFReader(tmp_path / "third.gguf").tensors if each.name == "blk.1.ffn_up.weight"]
    found = gguf.quants.dequantize(again.data, again.tensor_type)
    assert np.abs(found - own).max() < 0.15 * np.abs(own).max()


def test_a_checkpoint_of_few_bits_is_read(tmp_path: Path) -> None:
    """By its formats; a vector, the embedding and what else is a float stay the same."""
    assert main(["quantize", str(DEMO_MODEL), str(tmp_path / "w8a16"), "--scheme", "w8a16", "--group-size", "32"]) == 0
    written(tmp_path / "w8a16", tmp_path / "model.gguf", "bf16")
    with open_checkpoint(DEMO_MODEL) as own, open_checkpoint(gguf_folder(tmp_path / "model.gguf", tmp_path / "folders")) as again:
        for name in own.names():
            plain, found = whole(own, name), whole(again, name)
            assert np.abs(found - plain).max() <= 0.01 * np.abs(plain).max(), name
            assert ("proj" in name) != np.array_equal(found, plain), name


def test_mamba_has_llama_cpps_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads no others."""
    written(saved(tmp_path / "checkpoint", "granite_h_moe", monkeypatch), file := tmp_path / "model.gguf", "q8_0")
    shapes = {name: each.shape for name, each in read_header(file).tensors.items()}
    assert {shapes["blk.0.ssm_a"], shapes["blk.0.ssm_d"]} == {(8, 1)} and shapes["blk.0.ssm_dt.bias"] == (8,)
    assert shapes["blk.0.ssm_norm.weight"] == (2, 64) and len(shapes["blk.0.ssm_conv1d.weight"]) == 2


@pytest.mark.parametrize("type_", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_are_as_they_are_read(type_: str) -> None:
    """By the package, and by vnext; scales that are searched lose less than the package's."""
    weight = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    weight[3], weight[5, :32] = 0, -1e-9
    blocks, kind = to_blocks(weight, type_), gguf.GGMLQuantizationType[type_]
    found = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(found, getattr(BLOCKS, type_).to_float((blocks,)))
    own, theirs = (np.square(each - weight).sum() for each in (found, gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)))
    assert own < 0.95 * theirs if type_ in SEARCHED else own == theirs


def test_another_file_keeps_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of values, lists and what vnext does not know; tensors of the wanted type byte by byte."""
    folder = saved(tmp_path / "checkpoint", "llama31", monkeypatch)
    written(folder, tmp_path / "first.gguf", "q5_1", TEMPLATES)
    losses = written(tmp_path / "first.gguf", tmp_path / "second.gguf", "q8_0")
    first, second = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("first", "second"))
    assert first.fields.keys() == second.fields.keys()
    for name, field in first.fields.items():
        if name not in ("general.file_type", "GGUF.kv_count", "GGUF.tensor_count"):
            assert (field.types, field.contents()) == (second.fields[name].types, second.fields[name].contents()), name
    assert second.fields["general.file_type"].contents() == 7
    both = {name: {each.name: each for each in reader.tensors} for name, reader in (("first", first), ("second", second))}
    for name, each in both["first"].items():
        again = both["second"][name]
        if name in losses:
            assert (each.tensor_type.name, again.tensor_type.name) == ("Q5_1", "Q8_0") and losses[name] < 0.01
        else:
            assert again.tensor_type == each.tensor_type and np.array_equal(again.data, each.data)
    with pytest.raises(ModelError, match="no weights that can become Q8_0: all are so already, or too narrow"):
        written(tmp_path / "second.gguf", tmp_path / "third.gguf", "q8_0")


# ---- tokenizers


@pytest.mark.parametrize("name", CUTS)
def test_each_cut_is_found(name: str) -> None:
    """Or one that cuts all these texts as it does."""

    def of(cut: object) -> tokenizers.Tokenizer:
        steps = {"normalizer": {"type": "NFC"} if cut.composes else None, "pre_tokenizer": cut.steps()}
        return tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}))

    own = of(CUTS[name])
    found = cut_name(own, CUTS[name].takes_whole_words)
    if CUTS[found] != CUTS[name]:
        assert found == "stablelm2" and name.startswith(("bailing", "llada")), "a possessive quantifier that changes nothing"
        for line in lines(2000):
            assert own.pre_tokenizer.pre_tokenize_str(line) == of(CUTS[found]).pre_tokenizer.pre_tokenize_str(line)


def test_a_tokenizer_of_bytes_is_written() -> None:
    known = Ends(SIZES["vocab_size"] + 3, None, (1, 0))
    found = vocabulary_members(DEMO_MODEL, known, TEMPLATES)
    own = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    again = tokenizers.Tokenizer.from_str(json.dumps(Vocabulary(found).json()))
    for line in lines(2000):
        assert own.encode(line).ids == again.encode(line).ids, line
    assert found["tokenizer.ggml.pre"] == "gpt-2" and found["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    assert {each["name"]: each["template"] for each in Vocabulary(found).settings()["chat_template"]} == TEMPLATES
    assert sorted(Vocabulary(found).ends()) == [0, 1] and not found["tokenizer.ggml.add_bos_token"]


def pieces(folder: Path, **changes: object) -> tokenizers.Tokenizer:
    """A tokenizer of pieces as Llama's and Gemma's files have it."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator([line for line in lines(3000) if "日" not in line], trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    for name, value in changes.items():
        setattr(made, name, value)
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [each for each in spec["added_tokens"] if not each["content"].startswith("<0x")]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_tokenizer_of_pieces_is_written_with_scores(tmp_path: Path) -> None:
    own = pieces(tmp_path / "pieces")
    found = vocabulary_members(tmp_path / "pieces", Ends(900, 1, (2,)), {})
    again = tokenizers.Tokenizer.from_str(json.dumps(Vocabulary(found).json()))
    for line in lines(2000):
        ids = own.encode(line).ids
        assert again.encode(line).ids == ids and again.decode(ids) == own.decode(ids), line
    assert found["tokenizer.ggml.add_bos_token"] and not found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6] and found["tokenizer.ggml.unknown_token_id"] == 0


def test_tokenizers_that_no_file_can_state_are_refused(tmp_path: Path) -> None:
    pieces(tmp_path / "words", pre_tokenizer=pre_tokenizers.Punctuation())
    with pytest.raises(ModelError, match="has steps that no GGUF file can state; take --scheme w4a16"):
        vocabulary_members(tmp_path / "words", Ends(900, 1, (2,)), {})
    for name, model, sentence in (
        ("wordpiece", {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "continuing_subword_prefix": "#", "max_input_chars_per_word": 9}, "is of the kind WordPiece"),
        ("whitespace", {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "cuts texts as none does that llama.cpp has a name for"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        spec = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(ModelError, match=sentence):
            vocabulary_members(tmp_path / name, Ends(1, None, ()), {})


# ---- the command


def test_the_command_writes_a_file_with_the_models_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(DEMO_MODEL), str(tmp_path / "demo.gguf"), "--scheme", "q8_0"]) == 0
    assert "29 weights, 7.1 MB -> 3.9 MB" in capsys.readouterr().out
    assert chat_templates(gguf_folder(tmp_path / "demo.gguf", tmp_path / "folders")) == chat_templates(DEMO_MODEL)


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = saved(tmp_path / "checkpoint", "qwen2", monkeypatch), str(DEMO_MODEL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0, "layer_types": None}))
    other = saved(tmp_path / "other", "glm4", monkeypatch)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    uneven = saved(tmp_path / "uneven", "qwen3_5", monkeypatch, layer_types=kinds)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF1234")
    before, _ = sorted(tmp_path.iterdir()), capsys.readouterr()
    for argv, sentence in (
        ([model, str(tmp_path / "out"), "--scheme", "q4_0"], "has not the ending .gguf: give a name that has."),
        ([model, str(tmp_path / "broken.gguf"), "--scheme", "q4_0"], "broken.gguf is there already: give a name that is not."),
        ([str(tmp_path / "broken.gguf"), str(tmp_path / "new.gguf"), "--scheme", "q4_0"], "is no GGUF file that can be read"),
        ([str(other), str(tmp_path / "new.gguf"), "--scheme", "q4_0"], "Glm4ForCausalLM is not written as GGUF, only LlamaForCausalLM,"),
        ([str(folder), str(tmp_path / "new.gguf"), "--scheme", "q4_0"], "would state windows (17, 17, 17) as (); take --scheme w4a16"),
        ([str(uneven), str(tmp_path / "new.gguf"), "--scheme", "q4_0"], "layers [1, 2] attend, and a GGUF file of this architecture can"),
        ([str(tmp_path), str(tmp_path / "new.gguf"), "--scheme", "q8_0"], "is no GGUF file that can be read"),
        ([str(tmp_path), str(tmp_path / "new"), "--scheme", "w4a16"], "broken.gguf becomes a GGUF file alone: take --scheme q8_0, q6_k,"),
    ):  # fmt: skip
        assert main(["quantize", *argv]) == 2
        found = capsys.readouterr().err
        assert sentence in found and found.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["quantize", model, "new.gguf", "--scheme", "q4_0", "--group-size", "32"])
    assert "group_size is 32, and the blocks of q4_0 have a size of their own: leave it out" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_left_of_a_file_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    data = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    for number, scheme, sentence in (
        (b"\xff\x7f", "q4_1", "has numbers that are not finite, which cannot be quantised"),
        (b"\x7f\x7f", "q4_1", "has numbers too large for the scales of Q8_0: take --scheme bf16"),
            ):  # fmt: skip
        data[first : first + 2] = number
        (tmp_path / "model" / "model.safetensors").write_bytes(data)
        assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "demo.gguf"), "--scheme", scheme]) == 2
        assert sentence in capsys.readouterr().err
        assert [each.name for each in tmp_path.iterdir()] == ["model"]
