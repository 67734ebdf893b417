"""Weights as quantised checkpoints hold them, each from the format's definition: its tensors and the numbers that they stand for.

A case takes a weight [out, in] and gives the tensors by suffix of the module's name, and the numbers in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

GROUP = 32
RNG = np.random.default_rng(7)
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0]
Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, np.ndarray]


class Case(NamedTuple):
    """`settings`: of config.json."""

    settings: dict[str, Any]
    make: Callable[[np.ndarray], Made]


def words(values: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """values [N, C] in words of 32 bits along C, the first lowest; a run of bits holds the value `order` says."""
    per = 32 // bits
    packed = [[sum(int(row[at + (order[run] if order else run)]) << bits * run for run in range(per)) for at in range(0, len(row), per)]
              for row in values]  # fmt: skip
    return torch.from_numpy(np.array(packed, np.uint64).astype(np.uint32).view(np.int32))


def stream(values: np.ndarray, bits: int) -> torch.Tensor:
    """values [N, C] as one stream of bits a row."""
    rows = [sum(int(value) << bits * at for at, value in enumerate(row)) for row in values]
    packed = [[row >> 32 * at & 0xFFFFFFFF for at in range(values.shape[1] * bits // 32)] for row in rows]
    return torch.from_numpy(np.array(packed, np.uint64).astype(np.uint32).view(np.int32))


def rounded(weight: np.ndarray, bits: int, index: np.ndarray, dtype: torch.dtype, is_signed: bool = False) -> tuple[Any, ...]:
    """(codes [out, in], scales [out, groups], zeros [out, groups], numbers) with the group of each input in `index`."""
    groups, largest = index.max() + 1, 2**bits - 1
    parts = [weight[:, index == group] for group in range(groups)]
    spans = [(part.max(1) - part.min(1)) / largest for part in parts]
    scales = torch.from_numpy(np.stack(spans, 1)).to(dtype)
    wide = scales.double().numpy()
    zeros = np.stack([np.rint(-part.min(1) / wide[:, group]) for group, part in enumerate(parts)], 1).clip(1, largest)
    if is_signed:
        zeros[:] = 2 ** (bits - 1)
    codes = np.rint(weight / wide[:, index] + zeros[:, index]).clip(0, largest)
    return codes.astype(int), scales, zeros.astype(int), (codes - zeros[:, index]) * wide[:, index]


def awq(weight: np.ndarray) -> Made:
    codes, scales, zeros, numbers = rounded(weight, 4, np.arange(weight.shape[1]) // GROUP, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T.contiguous()}, numbers


def gptq(bits: int, in_order: bool = True, version: int = 1) -> Callable[[np.ndarray], Made]:
    def make(weight: np.ndarray) -> Made:
        index = np.arange(weight.shape[1]) // GROUP
        if not in_order:
            index = RNG.permutation(index)
        codes, scales, zeros, numbers = rounded(weight, bits, index, torch.float16)
        packed, packed_zeros = stream(codes, bits).T.contiguous(), stream(zeros.T - (version == 1), bits)
        order = torch.from_numpy(index.astype(np.int32))
        return {"qweight": packed, "qzeros": packed_zeros, "scales": scales.T.contiguous(), "g_idx": order}, numbers

    return make


def packed(bits: int, is_signed: bool = True, in_order: bool = True) -> Callable[[np.ndarray], Made]:
    def make(weight: np.ndarray) -> Made:
        index = np.arange(weight.shape[1]) // GROUP
        if not in_order:
            index = RNG.permutation(index)
        codes, scales, zeros, numbers = rounded(weight, bits, index, torch.bfloat16, is_signed)
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not is_signed:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if not in_order:
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, numbers

    return make


def spread(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    rows, columns = (np.arange(size) // each for size, each in zip(shape, block))
    return scales[rows][:, columns]


def eight(dtype: torch.dtype, block: tuple[int, int], names: tuple[str, str], flat: str = "") -> Callable[[np.ndarray], Made]:
    """Numbers of 8 bits with a scale for each block, (0, 0) for one; `flat` "row" or "one" drops axes of the scales."""

    def make(weight: np.ndarray) -> Made:
        largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
        sizes = tuple(size if each == 0 else each for size, each in zip(weight.shape, block))
        blocks = [[np.abs(weight[row : row + sizes[0], column : column + sizes[1]]).max() for column in range(0, weight.shape[1], sizes[1])]
                  for row in range(0, weight.shape[0], sizes[0])]  # fmt: skip
        scales = torch.tensor(blocks, dtype=torch.float64).div(largest).float()
        wide = spread(scales.double().numpy(), weight.shape, sizes)
        values = torch.from_numpy(weight / wide)
        held = values.round().to(dtype) if dtype is torch.int8 else values.clamp(-largest, largest).to(dtype)
        stored = scales.reshape({"": scales.shape, "row": (-1,), "one": ()}[flat])
        return {names[0]: held, names[1]: stored, "input_scale": torch.ones(1)}, held.double().numpy() * wide

    return make


def uneven(weight: np.ndarray) -> Made:
    """int-quantized with zeros."""
    codes, scales, zeros, numbers = rounded(weight, 8, np.zeros(weight.shape[1], int), torch.bfloat16)
    as_int8 = [torch.from_numpy((each - 128).astype(np.int8)) for each in (codes, zeros)]
    return {"weight": as_int8[0], "weight_scale": scales, "weight_zero_point": as_int8[1]}, numbers


def bnb8(weight: np.ndarray) -> Made:
    scb = torch.from_numpy(np.abs(weight).max(1)).float()
    held = np.rint(weight * 127 / scb.double().numpy()[:, None]).astype(np.int8)
    tensors = {"weight": torch.from_numpy(held), "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, held * (scb.double().numpy()[:, None] / 127)


def pairs(codes: np.ndarray, high_first: bool = False) -> torch.Tensor:
    first, second = codes[..., 0::2], codes[..., 1::2]
    return torch.from_numpy((first * 16 + second if high_first else first + second * 16).astype(np.uint8))


def nearest(values: np.ndarray, table: list[float]) -> np.ndarray:
    return np.abs(values[..., None] - np.array(table)).argmin(-1)


def float4(group: int, exponents: bool = False, modelopt: bool = False) -> Callable[[np.ndarray], Made]:
    table = [*FLOAT4, *(-each for each in FLOAT4)]

    def make(weight: np.ndarray) -> Made:
        largest = np.abs(weight.reshape(len(weight), -1, group)).max(-1) / 6
        if exponents:
            power = np.ceil(np.log2(largest)).astype(int)
            scales, whole, stored = 2.0**power, 1.0, torch.from_numpy((power + 127).astype(np.uint8))
            tensors: Tensors = {}
        else:
            factor = torch.tensor([448.0 / largest.max()], dtype=torch.float32)
            stored = torch.from_numpy(largest * factor.double().numpy()).to(torch.float8_e4m3fn)
            scales, whole = stored.double().numpy(), 1 / factor.double().item()
            tensors = {"weight_global_scale": factor}
            if modelopt:
                second = (1 / factor).reshape(())
                tensors, whole = {"weight_scale_2": second}, second.double().item()
        wide = np.repeat(scales, group, 1) * whole
        codes = nearest(weight / wide, table)
        return {"weight" if modelopt else "weight_packed": pairs(codes), "weight_scale": stored, **tensors}, np.array(table)[codes] * wide

    return make


def bnb4(nested: bool) -> Callable[[np.ndarray], Made]:
    def make(weight: np.ndarray) -> Made:
        flat, state = weight.reshape(-1), {"blocksize": 64, "shape": list(weight.shape), "quant_type": "nf4", "dtype": "bfloat16"}
        wide = np.abs(flat.reshape(-1, 64)).max(1)
        table = np.float32(NF4).astype(float)
        tensors: Tensors = {"weight.quant_map": torch.tensor(NF4), "weight.absmax": torch.from_numpy(wide).float()}
        if nested:
            offset, codes = float(np.float32(wide.mean())), np.linspace(-1, 1, 256).astype(np.float32)
            blocks = np.arange(len(wide)) // 256
            largest = np.array([np.abs(wide - offset)[blocks == each].max() for each in range(blocks.max() + 1)]).astype(np.float32)
            found = nearest((wide - offset) / largest[blocks], codes.tolist())
            wide = codes.astype(float)[found] * largest[blocks] + offset
            tensors |= {"weight.absmax": torch.from_numpy(found.astype(np.uint8)), "weight.nested_absmax": torch.from_numpy(largest),
                        "weight.nested_quant_map": torch.from_numpy(codes)}  # fmt: skip
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            wide = tensors["weight.absmax"].double().numpy()
        spans = np.repeat(wide, 64)
        codes4 = nearest(flat / spans, table.tolist())
        state_bytes = torch.from_numpy(np.frombuffer(json.dumps(state).encode(), np.uint8).copy())
        tensors |= {"weight": pairs(codes4, high_first=True).reshape(-1, 1), "weight.quant_state.bitsandbytes__nf4": state_bytes}
        return tensors, (table[codes4] * spans).reshape(weight.shape)

    return make


def torchao4(weight: np.ndarray) -> Made:
    """Int4Tensor of mslk's int4_row_quantize_zp: numbers lie around the middle of their group."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = torch.from_numpy((groups.max(2) - groups.min(2)) / 15).bfloat16()
    zeros = torch.from_numpy(groups.min(2) + 8 * scales.double().numpy()).bfloat16()
    wide, middle = (np.repeat(each.double().numpy(), GROUP, 1) for each in (scales, zeros))
    codes = np.rint((weight - middle) / wide).clip(-8, 7).astype(int)
    tensors = {"_weight_qdata": pairs(codes & 15).view(torch.int8), "_weight_scale": scales.T.contiguous()}
    return tensors | {"_weight_zero_point": zeros.T.contiguous()}, codes * wide + middle


E4, E5, SCALE = torch.float8_e4m3fn, torch.float8_e5m2, ("weight", "weight_scale")
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "quantization_status": "compressed"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48], "modules_to_not_convert": ["lm_head"]}
CASES = {
    "awq": Case({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}, awq),
    "gptq": Case({"quant_method": "gptq", "bits": 4}, gptq(4)),
    "gptq 8 bits": Case({"quant_method": "gptq", "bits": 8}, gptq(8)),
    "gptq 3 bits": Case({"quant_method": "gptq", "bits": 3}, gptq(3)),
    "gptq 2 bits": Case({"quant_method": "gptq", "bits": 2}, gptq(2)),
    "gptq act-order": Case({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, in_order=False)),
    "gptq_v2": Case({"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4}, gptq(4, version=2)),
    "auto-round": Case({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq(4)),
    "w4a16": Case(COMPRESSED | {"format": "pack-quantized"}, packed(4)),
    "w4a16 zeros": Case(COMPRESSED | {"format": "pack-quantized"}, packed(4, is_signed=False)),
    "w4a16 act-order": Case(COMPRESSED | {"format": "pack-quantized"}, packed(4, in_order=False)),
    "w8a16": Case(COMPRESSED | {"format": "pack-quantized"}, packed(8)),
    "w8a8": Case(COMPRESSED | {"format": "int-quantized"}, eight(torch.int8, (1, 0), SCALE)),
    "w8a8 zeros": Case(COMPRESSED | {"format": "int-quantized"}, uneven),
    "fp8 channel": Case(COMPRESSED | {"format": "float-quantized"}, eight(E4, (1, 0), SCALE)),
    "fp8 group": Case(COMPRESSED | {"format": "float-quantized"}, eight(E4, (1, GROUP), SCALE)),
    "fp8 tensor": Case(FP8, eight(E4, (0, 0), SCALE, "one")),
    "fp8 e5m2": Case(FP8, eight(E5, (1, 0), SCALE, "row")),
    "fp8 blocks": Case(BLOCKS, eight(E4, (48, 48), ("weight", "weight_scale_inv"))),
    "nvfp4": Case(COMPRESSED | {"format": "nvfp4-pack-quantized"}, float4(16)),
    "nvfp4 modelopt": Case({"quant_method": "modelopt", "quant_algo": "NVFP4"}, float4(16, modelopt=True)),
    "mxfp4": Case(COMPRESSED | {"format": "mxfp4-pack-quantized"}, float4(32, exponents=True)),
    "nf4": Case({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb4(False)),
    "nf4 nested": Case({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb4(True)),
    "llm.int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
    "torchao int8": Case({"quant_method": "torchao"}, eight(torch.int8, (1, 0), ("_weight_qdata", "_weight_scale"))),
    "torchao int4": Case({"quant_method": "torchao"}, torchao4),
}  # fmt: skip
