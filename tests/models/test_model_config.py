"""config.json becomes a configuration, or one sentence that names the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import PLAIN

from vnext.models.config import Rope, load_config, parse_config
from vnext.models.errors import ModelError
from vnext.models.registry import FAMILIES, family


def test_defaults_of_an_older_file() -> None:
    raw = {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "max_position_embeddings")}
    config = parse_config(raw, {})
    assert (config.head_dim, config.kv_head_count, config.position_count_max) == (8, 4, 2048)
    assert (config.rope, config.dtype, config.eos_token_ids) == (Rope(theta=10000.0), "float32", ())


def test_generation_config_names_the_end_tokens_first() -> None:
    raw = {**PLAIN, "eos_token_id": 2, "bos_token_id": 1}
    assert parse_config(raw, {}).eos_token_ids == (2,)
    config = parse_config(raw, {"eos_token_id": [7, 8], "bos_token_id": 5})
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 8), 5)


def test_both_spellings_of_rope() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    old = parse_config({**PLAIN, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}, {})
    new = parse_config({**PLAIN, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}}, {})
    assert old.rope == new.rope == Rope(theta=5e5, kind="llama3", factor=8.0)
    linear = parse_config({**PLAIN, "rope_scaling": {"type": "linear", "factor": 2}}, {})
    assert linear.rope == Rope(theta=10000.0, kind="linear", factor=2.0)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported; supported are Llama"),
    ({"architectures": None}, "names no architecture"),
    ({"hidden_size": None}, "config.json has no 'hidden_size'"),
    ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1 but is 'many'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1 but is 0"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0 but is -1"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported are silu"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported; supported are default, linear"),
    ({"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor'"),
    ({"sliding_window": 4096}, "sliding_window 4096 is not supported"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\) are not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false but is 'yes'"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them but is '</s>'"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**PLAIN, **changes}, {})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config.json"):
        load_config(tmp_path)
    for text, message in (("{", "cannot be read as JSON"), ("[]", "must hold a JSON object but holds list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert load_config(tmp_path).vocab_size == PLAIN["vocab_size"]


def test_every_parsed_architecture_has_a_family() -> None:
    for name in FAMILIES:
        assert parse_config({**PLAIN, "architectures": [name]}, {}).architecture == name
        assert callable(family(name).forward)
    with pytest.raises(ModelError, match="architecture 'Other' is not supported"):
        family("Other")
