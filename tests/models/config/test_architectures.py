"""Which architectures are supported, which are known and missing, and which are unknown."""

from __future__ import annotations

import pytest
from transformers.models.auto import modeling_auto

from vnext.models import outside
from vnext.models.registry import BODIES, FAMILIES, HEADS, MODEL_TYPES

TABLES = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

ENCODERS = {name for name, file in FAMILIES.items() if file.startswith("encoders.")}


def theirs() -> set[str]:
    values = [value for table in TABLES for value in table.values()]
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def test_what_transformers_has_is_supported_or_known_to_be_missing() -> None:
    assert [name for name in sorted(theirs() - set(FAMILIES)) if not outside.what_it_needs(name)] == []
    others = {"MiMoForCausalLM", "InternLM3ForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekForCausalLM"}
    hearing = {f"{name}ForConditionalGeneration" for name in ("Whisper", "Qwen2Audio", "Qwen2_5Omni")}
    assert set(FAMILIES) - theirs() - ENCODERS <= others | hearing


def test_nothing_is_in_two_lists() -> None:
    names = [name for listed in outside.NEEDS.values() for name in listed.split()]
    assert len(names) == len(set(names))
    writers = {outside._USE.sub("", name) for name in theirs()}
    ours = {name for name in FAMILIES if name not in ENCODERS or outside._USE.sub("", name) not in writers}
    assert [name for name in ours if outside.what_it_needs(name) and not name.endswith("ForConditionalGeneration")] == []
    assert set(MODEL_TYPES.values()) == set(FAMILIES) and set(BODIES.values()) <= set(FAMILIES) and not set(HEADS) & set(FAMILIES)


NEEDS = {
    "FalconForCausalLM": "a decoder", "Qwen2VLForConditionalGeneration": "images", "ZambaForCausalLM": "a state",
    "JetMoeForCausalLM": "experts", "DbrxForCausalLM": "experts", "BltForCausalLM": "bytes",
    "DeepseekV4ForCausalLM": "hyper-connections", "Qwen4ExpForCausalLM": "n-grams", "QwertyForCausalLM": "",
    "T5ForConditionalGeneration": "an encoder", "Ernie4_5_VLMoeForConditionalGeneration": "experts for the tokens of images",
}  # fmt: skip


@pytest.mark.parametrize(("name", "need"), NEEDS.items())
def test_what_they_need(name: str, need: str) -> None:
    assert need in outside.what_it_needs(name) and bool(outside.what_it_needs(name)) == bool(need)
