"""A decoder's whole step in one call of the compiled module: token ids in, tokens sampled out.

Owns the description of the model, made once, and that of a step, kept while the same arrays come again: a steady step then
touches a handful of objects, which matters because the weights push everything else out of the caches between two steps.
Every bit is that of the separate calls, which serve wherever this cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.native import KINDS, module
from vnext.kernels.cpu.stack import Angles, Caches, Stack


class StepModel(NamedTuple):
    """A decoder without its angles. `embedding` [V, hidden] is packed, or dense and of the stack's dtype; `head` [V, hidden]."""

    stack: Stack
    caches: Caches
    head_count: int
    kv_head_count: int
    block_size: int
    last_norm: torch.Tensor
    embedding: PackedLinear | torch.Tensor
    head: PackedLinear
    eps: float
    scale: float
    softcap: float


class StepArrays(NamedTuple):
    """One step of R rows, T tokens, S samples, all dense: as ForwardBatch (vnext/models/batch.py), and as sample_rows has it."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    block_table: torch.Tensor
    sample_at: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample_position: torch.Tensor


class DescribedModel(NamedTuple):
    """int64 numbers in the order of step.h, and what they are the addresses of."""

    table: np.ndarray
    address: int
    kept: tuple[StepModel, Angles]


class DescribedStep(NamedTuple):
    """int64 numbers in the order of step.h, what they are the addresses of, and where the tokens come: int64 [S]."""

    table: np.ndarray
    address: int
    kept: StepArrays
    tokens: np.ndarray


def describe_model(model: StepModel, angles: Angles) -> DescribedModel:
    """The model with `angles` [positions, R / 2] of the positions from 0 on."""
    stack, caches, packed = model.stack, model.caches, isinstance(model.embedding, PackedLinear)
    table = np.array([
        KINDS[stack.dtype], stack.table.ctypes.data, caches.places.ctypes.data, len(stack.layers), caches.block_stride,
        model.head_count, model.kv_head_count, model.block_size, caches.head_dim, stack.hidden, model.last_norm.data_ptr(),
        model.embedding.address if packed else model.embedding.data_ptr(), packed,
        model.embedding.outputs if packed else model.embedding.shape[0], model.head.address, model.head.outputs,
        2 * angles.cosine.shape[1], angles.cosine.shape[0], angles.cosine.data_ptr(), angles.sine.data_ptr(),
        *np.array([model.eps, model.scale, model.softcap]).view(np.int64),
    ], dtype=np.int64)  # fmt: skip
    return DescribedModel(table, table.ctypes.data, (model, angles))


def describe_step(arrays: StepArrays) -> DescribedStep:
    """A step, for as long as its arrays are where they are; what they hold may change."""
    tokens = np.empty(arrays.sample_at.shape[0], dtype=np.int64)
    sizes = (len(arrays.context_lengths), len(arrays.token_ids), len(tokens), arrays.block_table.stride(0))
    table = np.array([*sizes, *(array.data_ptr() for array in arrays), tokens.ctypes.data], dtype=np.int64)
    return DescribedStep(table, table.ctypes.data, arrays, tokens)


def run(model: DescribedModel, step: DescribedStep) -> bool:
    """Compute the step: the caches take its keys and values, `step.tokens` what is sampled. False, with nothing done, where a
    position is beyond the angles."""
    return module().run_step(model.address, step.address)
