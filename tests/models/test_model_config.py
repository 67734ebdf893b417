"""config.json becomes a configuration, or one sentence that names the value and the remedy."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from checkpoints import PLAIN

from vnext.kernels.calls import Router
from vnext.models import families
from vnext.models.config.adapter_config import read_adapter_settings
from vnext.models.config.model_config import Experts, ModelConfig, load_config, parse_config
from vnext.models.config.rope_config import Rope
from vnext.models.errors import ModelError
from vnext.models.registry import FAMILIES, HEADS, USUAL, Family, family


def test_defaults_of_an_older_file() -> None:
    raw = {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "max_position_embeddings")}
    config = parse_config(raw, {})
    assert (config.head_dim, config.kv_head_count, config.position_count_max) == (8, 4, 2048)
    assert (config.rope, config.dtype, config.eos_token_ids) == (Rope(theta=10000.0), "float32", ())


def test_generation_config_names_the_end_tokens_first() -> None:
    raw = {**PLAIN, "eos_token_id": 2, "bos_token_id": 1}
    assert parse_config(raw, {}).eos_token_ids == (2,)
    config = parse_config(raw, {"eos_token_id": [7, 8], "bos_token_id": 5})
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 8, 2), 5), "either file may name an end that the other lacks"
    assert parse_config({**raw, "eos_token_id": "2"}, {"eos_token_id": -1}).eos_token_ids == (2,)
    assert parse_config({**raw, "eos_token_id": [-1]}, {}).eos_token_ids == ()


def test_both_spellings_of_rope() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    old = parse_config({**PLAIN, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}, {})
    new = parse_config({**PLAIN, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}}, {})
    assert old.rope == new.rope == Rope(theta=5e5, kind="llama3", factor=8.0)
    linear = parse_config({**PLAIN, "rope_scaling": {"type": "linear", "factor": 2}}, {})
    assert linear.rope == Rope(theta=10000.0, kind="linear", factor=2.0)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["T5Model"]}, "'T5Model' is not supported: it is known and missing here, it needs an encoder; supported are L"),
    ({"architectures": ["DeepseekV4ForCausalLM"]}, "it needs several streams .hyper-connections. and attention to keys that are compressed; supported are"),
    ({"architectures": ["LlamaForTokenClassification"]}, "it needs a head that labels text or fills gaps"),
    ({"architectures": ["LamaForCausalLM"]}, "'LamaForCausalLM' is not supported: no such name is known here, check it in config.json; supported"),
    ({"architectures": None}, "names no architecture"),
    ({"hidden_size": None}, "config.json has no 'hidden_size'"),
    ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1 but is 'many'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1 but is 0"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0 but is -1"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported are silu"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported; supported are default, linear"),
    ({"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor'"),
    ({"sliding_window": 4096}, "sliding_window 4096 is not supported"),
    ({"quantization_config": {"quant_method": "hqq"}}, r"quantised weights \(hqq\) are not supported; .*--quantization int8"),
    ({"quantization_config": "fp8"}, r"quantised weights \('fp8'\) are not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported is 1.0"),
    ({"rope_scaling": 4}, "rope scaling must be an object but is 4"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2]}}, "short_factor must be a list of 4 numbers"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false but is 'yes'"),
    ({"max_position_embeddings": 2**62}, "max_position_embeddings must be at most 2147483647 but is 4611686018427387904"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers must be at most 16384 but is 2147483648"),
    ({"head_dim": 2**20}, "head_dim must be at most 16384"),
    ({"hidden_size": 10**4000}, r"hidden_size must be at most 1048576 but is 10{119}\.\.\.;"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number above 0 but is 10"),
    ({"rope_theta": 1e-45}, "rope_theta must be at least 1 but is 1e-45"),
    ({"rope_theta": float("inf")}, "rope_theta must be a number above 0 but is inf"),
    ({"rope_theta": float("nan")}, "rope_theta must be a number above 0 but is nan"),
    ({"hidden_act": ["silu"] * 1000}, "config.json has a value of the wrong type"),
    ({"eos_token_id": 2**62}, "eos_token_id must be a token id or a list of them"),
    ({"eos_token_id": -2}, "eos_token_id must be a token id or a list of them but is -2"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them but is '</s>'"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**PLAIN, **changes}, {})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config.json"):
        load_config(tmp_path)
    deep = '{"a":' * 100_000
    for text, message in (("{", "cannot be read as JSON"), (deep, "cannot be read as JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert load_config(tmp_path).vocab_size == PLAIN["vocab_size"]


GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "full_attention_interval": 2, "mamba_n_heads": 4, "attn_layer_indices": [1]}
GRANITE4 = {"num_local_experts": 0, "layers_block_type": ["attention", "attention"]}
NEMOTRON = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
WITH_TOWER = {"text_config": PLAIN, "vision_config": {"image_size": 32, "patch_size": 8}, "mm_tokens_per_image": 4}
SEEING = ("Idefics3", "SmolVLM", "MuseGlimmer", "LlavaOnevision", "Gemma3ForConditional")
PIXTRAL = WITH_TOWER | {"vision_config": {"image_size": 32, "patch_size": 8, "hidden_act": "silu"}}
TURNING = WITH_TOWER | {"text_config": PLAIN | {"rope_scaling": {"type": "mrope", "mrope_section": [PLAIN["hidden_size"] // PLAIN["num_attention_heads"] // 2, 0, 0]}}}
INTERLEAVED = TURNING | {"text_config": TURNING["text_config"] | {"head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]}, "num_hidden_layers": 3}}
SHARED = {"towers.siglip"}  # parts of several families
WHISPER = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim", "attention_heads")} | {"d_model": 8}
HEARING = {"text_config": PLAIN, "audio_config": {}}
OMNI = {"thinker_config": TURNING | {"audio_config": {}}}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}


def parse_as(architecture: str, **changes: Any) -> ModelConfig:
    beginnings = {
        "Gemma3n": {"num_kv_shared_layers": 0}, "GraniteMoeHybrid": GRANITE4, "NemotronH": NEMOTRON, "Mamba2": {"num_heads": 2, "head_dim": 32, "n_groups": 1}, "Whisper": WHISPER, "Qwen2Audio": HEARING,
        "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "Lfm3": {"layer_types": ["conv", "full_attention"]},
        **dict.fromkeys(("KimiLinear", "OlmoHybrid", "BailingHybrid"), HALF_LINEAR),
        "CohereCompassForConditional": INTERLEAVED | {"text_config": {**INTERLEAVED["text_config"], "hidden_size": 32, "num_attention_heads": 2}}, "Mistral3": PIXTRAL, "Qwen2_5_VL": TURNING, "Qwen2_5Omni": OMNI, "Qwen3VL": INTERLEAVED, **dict.fromkeys(SEEING, WITH_TOWER),
    }  # fmt: skip
    own = next((found for name, found in beginnings.items() if architecture.startswith(name)), GPT2)
    return parse_config({**PLAIN, **own, "architectures": [architecture], **changes}, {})


def test_every_architecture_has_a_whole_family() -> None:
    for name in FAMILIES:
        assert parse_as(name).architecture == name
        assert all(callable(part) for part in family(name)[1:]) and family(name).WEIGHT_AXES
    with pytest.raises(ModelError, match="architecture 'Other' is not supported"):
        family("Other")


def test_every_file_of_a_family_is_in_the_table_and_defines_what_one_is_made_of() -> None:
    folder = Path(families.__file__).parent
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__")
    files = {".".join(path.parts) for path in paths} - SHARED
    assert files == {*FAMILIES.values(), *HEADS.values()}
    for name in files:
        assert {*Family._fields} - {*USUAL} <= {*vars(import_module(f"vnext.models.families.{name}"))}


def test_windows() -> None:
    assert parse_as("MistralForCausalLM").windows == () and parse_as("MistralForCausalLM").position_count_max == 512
    assert parse_as("MistralForCausalLM", sliding_window=40).windows == (40, 40)
    assert parse_as("MistralForCausalLM", sliding_window=None).windows == ()
    assert parse_as("MistralForCausalLM", max_position_embeddings=8192).windows == (4096, 4096)
    assert parse_as("Qwen2ForCausalLM", sliding_window=40).windows == ()
    assert parse_as("Gemma2ForCausalLM").windows == () and parse_as("Gemma3ForCausalLM").windows == (4096, 4096)
    upper = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    assert parse_as("Qwen2ForCausalLM", **upper).windows == (0, 40)
    assert parse_as("Gemma2ForCausalLM", sliding_window=40, num_hidden_layers=4).windows == (40, 0, 40, 0)
    assert parse_as("Gemma3ForCausalLM", sliding_window=40, num_hidden_layers=7).windows == (40,) * 5 + (0, 40)
    letters = {"sliding_window": 40, "sliding_window_pattern": "LLLG"}
    assert parse_as("Exaone4ForCausalLM", num_hidden_layers=6, **letters).windows == (40, 40, 40, 0, 40, 0)
    named = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 40}
    assert parse_as("Gemma2ForCausalLM", **named).windows == (0, 40)
    with pytest.raises(ModelError, match="layer_types must name full_attention or sliding_attention for each of 2"):
        parse_as("Gemma2ForCausalLM", layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize(
    ("architecture", "key"),
    [(name, "max_window_layers") for name in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Dots1ForCausalLM")]
    + [("Ernie4_5_MoeForCausalLM", "moe_layer_start_index")],
)
def test_first_layers_are_counted_by_a_whole_number(architecture: str, key: str) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 40, "num_attention_heads": 4}
    parse_as(architecture, **windows, **{key: None})
    with pytest.raises(ModelError, match=f"{key} must be a whole number of at least 1 but is 'two'"):
        parse_as(architecture, **windows, **{key: "two"})


def test_gemma_leaves_out_what_transformers_assumes() -> None:
    bare = {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    config = parse_config({**bare, "architectures": ["Gemma2ForCausalLM"], "head_dim": 256}, {})
    assert (config.activation, config.tie_embeddings, config.query_scale) == ("gelu_tanh", True, 1 / 16)
    assert (config.attention_softcap, config.logits_softcap, config.local_rope) == (50.0, 30.0, None)
    config = parse_as("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (config.attention_softcap, config.logits_softcap) == (0.0, 0.0)
    assert config.rope == Rope(theta=1e6, kind="linear", factor=8.0) and config.local_rope == Rope(theta=1e4)


def test_the_language_part_of_gemma3_that_sees() -> None:
    text = {**PLAIN, "num_hidden_layers": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "head_dim": None}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    config = parse_config(raw, {})
    assert (config.layer_count, config.hidden_size, config.head_dim) == (3, 32, 256)
    assert config.eos_token_ids == (1, 106) and config.rope.factor == 8.0


def test_how_far_a_stretched_rope_reaches() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = parse_as("Qwen2ForCausalLM", rope_scaling=yarn)
    assert config.position_count_max == 2048 and config.rope.attention_factor == pytest.approx(1.138629)
    mscale = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert parse_as("Qwen2ForCausalLM", rope_scaling=mscale).rope.attention_factor == 1.0
    longrope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = parse_as("Phi3ForCausalLM", rope_scaling=longrope, original_max_position_embeddings=64)
    assert config.position_count_max == 64 and config.rope.attention_factor == pytest.approx(1.5**0.5)
    for asked, longest, divisor in ((64, 64, 1.0), (65, 512, 9.0), (512, 512, 9.0)):
        found = parse_as("Phi3ForCausalLM", rope_scaling=longrope, original_max_position_embeddings=64, asked_length=asked)
        assert (found.position_count_max, found.rope.divisors) == (longest, (divisor,) * 4)
    scales = {**longrope, "type": "longrope", "short_mscale": 1.25, "long_mscale": 1.5}
    for asked, factor in ((64, 1.25), (65, 1.5)):
        found = parse_as("PhiMoEForCausalLM", rope_scaling=scales, original_max_position_embeddings=64, asked_length=asked)
        assert found.architecture == "PhimoeForCausalLM" and found.rope.attention_factor == factor
    dynamic = parse_as("LlamaForCausalLM", rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert (dynamic.position_count_max, dynamic.rope) == (512, Rope(theta=10000.0))


def test_experts() -> None:
    config = parse_as("Qwen3MoeForCausalLM", num_experts=16, decoder_sparse_step=2, num_hidden_layers=5)
    assert config.experts == Experts(
        count=16, intermediate_size=768, router=Router(8, False), dense_layers=(0, 2, 4)
    )
    named = parse_as("Qwen3MoeForCausalLM", mlp_only_layers=[1], norm_topk_prob=True)
    assert named.experts.dense_layers == (1,) and named.experts.router.normalise and named.experts.count == 128
    assert parse_as("MixtralForCausalLM").experts.intermediate_size == 52


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supp"),
    ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function 'relu' is not supported"),
    ("GPT2LMHeadModel", {"activation_function": "silu"}, "activation_function 'silu' is not supported"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 is not supported; .* at most 1.0"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers but is 3"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), REFUSED)
def test_what_a_family_cannot_do_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_as(architecture, **changes)


def test_a_file_without_architectures_is_known_by_its_model_type() -> None:
    bare = {key: value for key, value in PLAIN.items() if key != "architectures"}
    assert parse_config(bare | {"model_type": "llama"}, {}).architecture == "LlamaForCausalLM"
    with pytest.raises(ModelError, match="names no architecture"):
        parse_config(bare | {"model_type": "unheard_of"}, {})


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_adapter_that_changed_its_base_is_refused(tmp_path: Path, way: str) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for begun in (True, False, "gaussian", "eva"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(plain | {"init_lora_weights": begun}))
        assert read_adapter_settings(tmp_path).rank == 4
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain | {"init_lora_weights": way}))
    with pytest.raises(ModelError, match="changed the base's weights too"):
        read_adapter_settings(tmp_path)


def test_mistral_s_layers_have_the_windows_that_they_name() -> None:
    """Transformers takes such a file for Ministral's."""
    raw = PLAIN | {"architectures": ["MistralForCausalLM"], "sliding_window": 40}
    kinds = ["full_attention", "sliding_attention"]
    assert parse_config(raw, {}).windows == (40, 40) and parse_config(raw | {"layer_types": kinds}, {}).windows == (0, 40)
    assert parse_config(raw | {"layer_types": kinds, "architectures": ["MinistralForCausalLM"]}, {}).windows == (0, 40)
    assert parse_config(raw | {"layer_types": ["full_attention"] * 2}, {}).windows == ()
    assert parse_config(raw | {"sliding_window": None}, {}).windows == ()
    with pytest.raises(ModelError, match="config.json has no 'sliding_window'"):
        parse_config(raw | {"sliding_window": None, "layer_types": kinds}, {})
