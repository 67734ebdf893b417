"""The bundled demo model: complete, small, loadable, and trained well enough to read like Python documentation."""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "vnext" / "demo_model"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SIZE_MAX_BYTES = 8_000_000
# An untrained model gives about 3,072, the size of the vocabulary; unigram frequencies alone give several hundred.
PERPLEXITY_MAX = 30.0
EXCERPT = (
    "Wrap a single paragraph of text, returning a list of wrapped lines.\n\n"
    "Reformat the single paragraph in 'text' so it fits in lines of no\n"
    "more than 'width' columns, and return a list of wrapped lines.  By\n"
    "default, tabs in 'text' are expanded with string.expandtabs(), and\n"
    "all other whitespace characters (including newline) are converted to\n"
    "space.  See TextWrapper class for available keyword args to customize\n"
    "wrapping behaviour."
)


def read_json(name: str) -> dict[str, object]:
    return json.loads((MODEL / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    """The training script as a module: its forward needs nothing of the engine."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import train_demo_model
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return train_demo_model


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}


@pytest.fixture(scope="module")
def reference() -> object:
    """The checkpoint as Hugging Face's transformers loads it, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def render(messages: list[dict[str, object]], *, add_generation_prompt: bool = True) -> str:
    def raise_exception(message: str) -> None:
        raise ValueError(message)

    template = jinja2.Environment().from_string(str(read_json("tokenizer_config.json")["chat_template"]))
    return template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, raise_exception=raise_exception,
    )


def greedy(reference: object, tokenizer: Tokenizer, prompt: str, token_count_max: int) -> str:
    prompt_ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.no_grad():
        output = reference.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), do_sample=False,
                                    max_new_tokens=token_count_max)
    return tokenizer.decode(output[0, prompt_ids.shape[1]:].tolist())


def test_exactly_the_data_files_are_there_and_small() -> None:
    assert sorted(path.name for path in MODEL.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= SIZE_MAX_BYTES


def test_config_is_a_llama_that_two_ranks_can_split() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["num_attention_heads"] > config["num_key_value_heads"], "grouped-query attention"
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[size] % 2 == 0, size
    assert config["max_position_embeddings"] == 1024 and config["tie_word_embeddings"] is True


def test_weights_have_the_shapes_of_the_config(trainer: ModuleType) -> None:
    config, stored = read_json("config.json"), load_file(MODEL / "model.safetensors")
    expected = trainer.initial_weights(trainer.Shape(), torch.Generator())
    assert trainer.model_config(trainer.Shape()) == config
    assert {name: tensor.shape for name, tensor in stored.items()} == {name: t.shape for name, t in expected.items()}
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in stored.values())


def test_special_tokens_are_single_ids_that_end_generation(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    for token in ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"):
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]
    ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")]
    assert read_json("generation_config.json")["eos_token_id"] == ends
    assert read_json("config.json")["eos_token_id"] == ends[0]


@pytest.mark.parametrize("text", [
    "Return a new list.", "  leading and trailing  ", "a\tb\r\n\n\n  c", "def f(x: int = 3) -> None: ...",
    "naïve café – “quotes”",
    "你好，世界", "שלום عليكم", "👩‍👩‍👧 🇫🇷 e\u0301", "\x00\x7f\ufeff\ufffd", "".join(map(chr, range(0x250))),
])
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_shortens_english(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(EXCERPT).ids) < len(EXCERPT) / 2.5


def test_chat_template_renders_turns() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is json? "},
                {"role": "assistant", "content": "A module."},
                {"role": "user", "content": [{"type": "text", "text": "Why"}]}]
    turns = "<|system|>Be brief.<|end|><|user|>What is json?<|end|><|assistant|>A module.<|end|><|user|>Why<|end|>"
    assert render(messages) == turns + "<|assistant|>"
    assert render(messages, add_generation_prompt=False) == turns


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(ValueError, match="not tool"):
        render([{"role": "tool", "content": "x"}])


def test_known_documentation_is_likely(
    trainer: ModuleType, weights: dict[str, torch.Tensor], tokenizer: Tokenizer,
) -> None:
    windows = torch.tensor([[0, *tokenizer.encode(EXCERPT).ids]])
    with torch.no_grad():
        loss = trainer.mean_loss(weights, windows, trainer.Shape())
        untrained_weights = trainer.initial_weights(trainer.Shape(), torch.Generator())
        untrained = trainer.mean_loss(untrained_weights, windows, trainer.Shape())
    assert math.exp(loss) < PERPLEXITY_MAX < math.exp(untrained) / 10


def test_transformers_computes_the_same_logits(
    trainer: ModuleType, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, reference: object,
) -> None:
    tokens = torch.tensor([tokenizer.encode(EXCERPT).ids])
    with torch.no_grad():
        expected, ours = reference(tokens).logits, trainer.forward(weights, tokens, trainer.Shape())
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)  # float32 sums in another order


def test_greedy_continuation_reads_like_documentation(tokenizer: Tokenizer, reference: object) -> None:
    text = greedy(reference, tokenizer, "Return a new", 40)
    words = text.split()
    assert text.isascii() and len(words) >= 3, text
    assert sum(character.isalpha() or character.isspace() for character in text) > 0.7 * len(text), text


def test_chat_answer_ends_by_itself(tokenizer: Tokenizer, reference: object) -> None:
    answer = greedy(reference, tokenizer, render([{"role": "user", "content": "Hello"}]), 60)
    assert answer.startswith("Hello! Ask me about"), answer
    assert len(tokenizer.encode(answer).ids) < 40, answer
