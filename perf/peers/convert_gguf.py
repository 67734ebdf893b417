"""Turns a Hugging Face checkpoint into a GGUF file, bfloat16 matrices as they are: `convert_gguf.py CHECKPOINT OUT`.

Owns the two architectures' keys and the order of rotated rows. Runs in the environment of the engine llamacpp (numpy
and `gguf` only). Vectors become float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
# llama.cpp rotates neighbouring rows for Llama, Hugging Face rows half a head apart; for Qwen3 both do the latter.
PAIRED = {"llama": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"), "qwen3": ()}


def convert(folder: Path, out: Path) -> None:
    """Write `out`, by rename, so that a reader never sees half a file."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    add_sizes(writer, config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, bits in tensors(folder / "model.safetensors"):
        if name.endswith(PAIRED[kind]):
            bits = paired(bits, config["head_dim"])
        add_tensor(writer, names.get_name(name, try_suffixes=(".weight",)), bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """A byte-level BPE, as llama.cpp calls GPT-2's. Special tokens are control tokens."""
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bfloat16 bits (uint16) of every tensor of a safetensors file, mapped and not read."""
    mapped = np.memmap(path, np.uint8, "r")
    header_size = int(mapped[:8].view("<u8")[0])
    header = json.loads(mapped[8 : 8 + header_size].tobytes())
    header.pop("__metadata__", None)
    data = mapped[8 + header_size :]
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"tensor {name} has the dtype {entry['dtype']}: this converter takes BF16 only")
        start, end = entry["data_offsets"]
        yield name, data[start:end].view("<u2").reshape(entry["shape"])


def paired(bits: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads * head_dim, in] in a new order: those that are rotated together become neighbours."""
    heads = bits.reshape(-1, 2, head_dim // 2, bits.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(bits.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, bits: np.ndarray) -> None:
    if bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
    else:
        writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
