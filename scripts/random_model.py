"""Write a checkpoint of random weights in Hugging Face's layout: `python scripts/random_model.py SHAPE OUT [--seed 0]`.

Owns the shapes (those of known models, so that sizes are realistic) and the files. Speed depends on the shapes, not on the
values of the weights. The tokenizer is the demo model's, padded to the vocabulary size; no id ends an answer. Tensors are
drawn and written piece by piece to bound memory. The same seed and numpy version give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

TOKENIZER = Path(__file__).resolve().parents[1] / "vnext" / "demo_model" / "tokenizer.json"
WEIGHT_STD = 0.02
PIECE_ELEMENTS = 2**21
BF16_BYTES = 2
BF16_ONE = 0x3F80
Pieces = Callable[[tuple[int, ...], np.random.Generator], Iterator[np.ndarray]]
"""A tensor's sizes -> its bfloat16 bits (uint16) in order, contiguous."""
Members = dict[str, object]
Tensors = dict[str, tuple[int, ...]]
FILLER = "\u0120word{}"  # byte-level spelling of " word..."; no merge leads there, so texts never encode to it


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only model. `query_key_norms`: queries and keys are normalised per head, as in Qwen3."""

    architecture: str
    model_type: str
    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    position_count_max: int
    rope_theta: float
    norm_epsilon: float
    tied: bool
    query_key_norms: bool


def llama(**sizes: object) -> Shape:
    """Return a Shape with the values that all Llama models share filled in."""
    common = {"architecture": "LlamaForCausalLM", "model_type": "llama", "query_key_norms": False}
    return Shape(**common, rope_theta=10000.0, norm_epsilon=1e-5, **sizes)


def qwen3(**sizes: object) -> Shape:
    """Return a Shape with the values that all Qwen3 models share filled in."""
    common = {"architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "query_key_norms": True}
    return Shape(**common, rope_theta=1e6, norm_epsilon=1e-6, **sizes)


SHAPES = {
    "llama-tiny": llama(
        hidden_size=64, layer_count=2, head_count=4, kv_head_count=2, head_dim=16, intermediate_size=160,
        vocab_size=3200, position_count_max=2048, tied=False,
    ),
    "qwen3-tiny": qwen3(
        hidden_size=64, layer_count=2, head_count=4, kv_head_count=2, head_dim=32, intermediate_size=160,
        vocab_size=3200, position_count_max=2048, tied=False,
    ),
    "llama-135m": llama(  # SmolLM2-135M, but for its rope_theta
        hidden_size=576, layer_count=30, head_count=9, kv_head_count=3, head_dim=64, intermediate_size=1536,
        vocab_size=49152, position_count_max=8192, tied=True,
    ),
    "dense-350m": llama(  # layers of as many weights as Granite-4-H-350M's, which is a hybrid, and the same head
        hidden_size=768, layer_count=32, head_count=12, kv_head_count=4, head_dim=64, intermediate_size=2880,
        vocab_size=100352, position_count_max=32768, tied=True,
    ),
    "llama-8b": llama(  # Llama 3.1 8B, but for its rope_theta
        hidden_size=4096, layer_count=32, head_count=32, kv_head_count=8, head_dim=128, intermediate_size=14336,
        vocab_size=128256, position_count_max=131072, tied=False,
    ),
    "llama-1b": llama(  # Llama 3.2 1B, but for its rope
        hidden_size=2048, layer_count=16, head_count=32, kv_head_count=8, head_dim=64, intermediate_size=8192,
        vocab_size=128256, position_count_max=131072, tied=True,
    ),
    "qwen3-4b": qwen3(  # Qwen3-4B
        hidden_size=2560, layer_count=36, head_count=32, kv_head_count=8, head_dim=128, intermediate_size=9728,
        vocab_size=151936, position_count_max=40960, tied=True,
    ),
    "qwen3-0.6b": qwen3(  # Qwen3-0.6B
        hidden_size=1024, layer_count=28, head_count=16, kv_head_count=8, head_dim=128, intermediate_size=3072,
        vocab_size=151936, position_count_max=40960, tied=True,
    ),
}  # fmt: skip


def write_checkpoint(shape: Shape, folder: Path, seed: int = 0, pieces: Pieces | None = None) -> int:
    """Write all files into `folder`, the weights last and by rename. Returns the number of parameters.

    `pieces`: what draws a tensor, in place of `tensor_pieces`; then the bytes are its own.
    """
    return write_files(folder, model_config(shape), tokenizer_config(shape.position_count_max), tensor_shapes(shape), seed, pieces)


def write_files(
    folder: Path, config: Members, tokenizer: Members, tensors: Tensors, seed: int = 0, pieces: Pieces | None = None
) -> int:
    """As write_checkpoint, of a model of these tensors. `config` and `tokenizer`: config.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config,
        "generation_config.json": {"do_sample": False, "pad_token_id": 0},
        "tokenizer_config.json": tokenizer,
        "tokenizer.json": filled_tokenizer(int(str(config["vocab_size"]))),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    part = folder / "model.safetensors.part"
    with part.open("wb") as stream:
        write_tensors(stream, tensors, seed, pieces or tensor_pieces)
    part.replace(folder / "model.safetensors")
    return sum(prod(sizes) for sizes in tensors.values())


def tensor_shapes(shape: Shape) -> Tensors:
    """Return the shape of every tensor by its Hugging Face name; matrices are [out, in]."""
    hidden, queries, keys = shape.hidden_size, shape.head_count * shape.head_dim, shape.kv_head_count * shape.head_dim
    layer: Tensors = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
        "mlp.down_proj": (hidden, shape.intermediate_size),
    }
    if shape.query_key_norms:
        layer |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
    tensors: Tensors = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for index in range(shape.layer_count):
        tensors |= {f"model.layers.{index}.{name}.weight": sizes for name, sizes in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    return tensors if shape.tied else tensors | {"lm_head.weight": (shape.vocab_size, hidden)}


def write_tensors(stream: BinaryIO, tensors: Tensors, seed: int, pieces: Pieces) -> None:
    """Write a safetensors file: the header's length (8 bytes, little-endian), the header as JSON, then the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes in tensors.items():
        end = offset + prod(sizes) * BF16_BYTES
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(len(encoded).to_bytes(8, "little") + encoded)
    for index, sizes in enumerate(tensors.values()):
        for piece in pieces(sizes, np.random.default_rng([seed, index])):
            stream.write(piece.data)


def tensor_pieces(sizes: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the tensor in order as bfloat16 bits (uint16): ones for a norm, N(0, WEIGHT_STD^2) for a matrix."""
    if len(sizes) == 1:
        yield np.full(sizes, BF16_ONE, np.uint16)
        return
    total = prod(sizes)
    for start in range(0, total, PIECE_ELEMENTS):
        drawn = rng.standard_normal(min(PIECE_ELEMENTS, total - start), np.float32)
        yield bfloat16_bits(drawn * np.float32(WEIGHT_STD))


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Convert finite float32 to bfloat16 bits (uint16), rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def model_config(shape: Shape) -> Members:
    return {
        "architectures": [shape.architecture], "model_type": shape.model_type, "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count, "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count, "head_dim": shape.head_dim, "hidden_act": "silu",
        "max_position_embeddings": shape.position_count_max, "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": WEIGHT_STD, "tie_word_embeddings": shape.tied,
        "use_cache": True, "bos_token_id": None, "eos_token_id": None, "torch_dtype": "bfloat16",
    }  # fmt: skip


def tokenizer_config(position_count_max: int) -> Members:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": position_count_max, "bos_token": None,
        "eos_token": None, "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip


def filled_tokenizer(vocab_size: int) -> dict[str, object]:
    """Return the demo model's tokenizer with a filler word for each additional id. Raises ValueError if it is larger."""
    tokenizer = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    if vocab_size < len(vocab):
        raise ValueError(f"the vocabulary has {vocab_size} tokens, the tokenizer alone {len(vocab)}: make it larger")
    vocab |= {FILLER.format(index): index for index in range(len(vocab), vocab_size)}
    if len(vocab) != vocab_size:
        raise ValueError("a filler word is in the demo model's tokenizer already: choose another FILLER")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a checkpoint of random weights.")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="folder, made where it is missing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin_s = time.perf_counter()
    count = write_checkpoint(SHAPES[options.shape], options.out, options.seed)
    print(f"{options.out}: {count:,} parameters in {time.perf_counter() - begin_s:.1f} s")


if __name__ == "__main__":
    main()
