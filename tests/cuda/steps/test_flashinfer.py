"""What we ask of FlashInfer, by a stand-in with the documented arguments of its wrapper: pages, windows, scales and turns.

FlashInfer itself needs a GPU and is not run here. The stand-in attends to exactly what it was told, in plain torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_steps import Options, Range, Sequences, Shape, check, make_sequences
from device_twin import TwinDevice
from msgspec.structs import replace
from rank_drive import device_rank, drive, runner_of, some_arrivals, started_with, tiny_checkpoint

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cuda import flashinfer
from vnext.kernels.table import plain_operations
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.determinism import Invariance
from vnext.runtime.protocol.settings import GpuSettings, SettingsError
from vnext.runtime.rank import gpu_loading
from vnext.sampling.sampling import sampler_for


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper, as far as its documentation says what `plan` and `run` take."""

    planned_in_turn: list[int] = []

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "HND"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
        causal: bool = False, sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype is torch.int32 for each in given) and causal
        assert 1 <= int(paged_kv_last_page_len.min()) <= int(paged_kv_last_page_len.max()) <= page_size
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self._given = [each.tolist() for each in given]
        self._layer = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale, self._window, self._cap, self._types = sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type)
        self.planned_in_turn.append(id(self))

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        heads, kv_heads, head_dim, page_size = self._layer
        assert q.shape[1:] == (heads, head_dim) and keys.shape[1:] == (kv_heads, page_size, head_dim)
        assert self._types == (q.dtype, keys.dtype)
        starts, pages, indices, last = self._given
        result = torch.empty_like(q)
        for row in range(len(last)):
            own = indices[pages[row] : pages[row + 1]]
            length = (len(own) - 1) * page_size + last[row]
            key, value = (cache[own].transpose(0, 1).flatten(1, 2)[:, :length].double() for cache in paged_kv_cache)
            key, value = (part.repeat_interleave(heads // kv_heads, 0) for part in (key * k_scale, value * v_scale))
            query = q[starts[row] : starts[row + 1]].double().transpose(0, 1)
            scores = query @ key.transpose(1, 2) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            place = torch.arange(length)
            limit = torch.arange(length - query.shape[1], length)[:, None]
            hidden = place > limit
            if self._window >= 0:
                hidden |= place < limit - self._window  # the window's left end is inclusive
            seen = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.nan_to_num(0.0)
            result[starts[row] : starts[row + 1]] = seen.transpose(0, 1).to(q.dtype)
        return result


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(flashinfer, "_planners", {})
    monkeypatch.setattr(flashinfer, "is_installed", lambda: True)
    monkeypatch.setattr(Wrapper, "planned_in_turn", [])


def attend(sequences: Sequences, ranges: list[Range], options: Options) -> list[torch.Tensor]:
    shape = sequences.shape
    lengths = torch.tensor([0] + [stop - start for _, start, stop in ranges])
    table = torch.full((len(ranges), max(map(len, sequences.blocks)) + 1), 2**20, dtype=torch.int32)
    for row, (index, _, stop) in enumerate(ranges):
        table[row, : -(-stop // shape.block_size)] = torch.tensor(sequences.blocks[index][: -(-stop // shape.block_size)])
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in ranges])
    contexts = torch.tensor([stop for _, _, stop in ranges]).numpy()
    described = (lengths.cumsum(0).numpy(), contexts, table, shape.block_size, shape.kv_heads, (options.window,))
    metadata = flashinfer.attention_metadata(AttentionStep(*described))
    found = [flashinfer.paged_attention(query, AttentionCall(*sequences.caches, metadata, shape.head_dim**-0.5, *options)) for _ in range(2)]
    assert torch.equal(*found), "two layers share a plan"
    return list(found[0].split(lengths[1:].tolist()))


@pytest.mark.parametrize("options", [Options(), Options(window=20), Options(softcap=2.0)], ids=["plain", "window", "cap"])
def test_a_step_is_what_its_arguments_say(options: Options) -> None:
    sequences = make_sequences([70, 16, 33], Shape(4, 2, 64, 16), torch.bfloat16)
    given = [Range(0, 60, 70), Range(1, 15, 16), Range(2, 0, 33)]
    for found, one in zip(attend(sequences, given, options), given, strict=True):
        check(found, sequences, one, options)
    assert len(Wrapper.planned_in_turn) == 1


def test_wrappers_are_planned_in_turn() -> None:
    """A plan that is on its way must not be overwritten by the next step's."""
    sequences = make_sequences([20], Shape(2, 1, 64, 16), torch.bfloat16)
    for _ in range(2 * flashinfer.WRAPPERS):
        attend(sequences, [Range(0, 19, 20)], Options())
    turns = Wrapper.planned_in_turn
    assert len(set(turns)) == flashinfer.WRAPPERS and turns[: flashinfer.WRAPPERS] == turns[flashinfer.WRAPPERS :]


def test_steps_in_pieces_and_as_they_are_give_the_tokens_of_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = plain_operations()
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: plain)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    monkeypatch.setattr("vnext.models.layers.layers.operations", lambda device_type: plain)
    folder, found = tiny_checkpoint(tmp_path / "tiny"), []
    theirs = plain._replace(attention_metadata=flashinfer.attention_metadata, paged_attention=flashinfer.paged_attention)
    for operations, shapes in ((plain, Shapes((), ())), (theirs, Shapes((), ())), (theirs, Shapes((), (24,)))):
        variants = DeviceVariants(operations=operations, choose=sampler_for("cpu"), shapes=shapes)
        answers = drive(
            device_rank(runner_of(folder), TwinDevice(), variants),
            started_with(runner_of(folder)),
            some_arrivals(4, seed=8),
        )
        found.append({id_: [token for token, _ in each] for id_, each in answers.items()})
    assert found[0] == found[1] == found[2] and Wrapper.planned_in_turn


def test_it_is_chosen_where_it_serves_and_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = GpuSettings(attention="flashinfer")
    runner = runner_of(tiny_checkpoint(tmp_path / "tiny", head_dim=64), "bfloat16")
    runner.invariance = Invariance(holds=False, why="")
    monkeypatch.setattr("vnext.kernels.cuda.backends.is_usable", lambda: True)
    variants = gpu_loading.device_variants(runner, asked)
    assert variants.operations.paged_attention is flashinfer.paged_attention and variants.cascade is None
    assert variants.shapes.rows == () and variants.shapes.tokens
    for change, reason in (
        (lambda: monkeypatch.setattr(runner, "invariance", Invariance(holds=True, why="")), "results depend on the batch"),
        (lambda: monkeypatch.setattr(runner, "settings", replace(runner.settings, dtype="float32")), "does not know heads of 64 in float32"),
        (lambda: monkeypatch.setattr(flashinfer, "is_installed", lambda: False), "is not installed here"),
    ):
        change()
        with pytest.raises(SettingsError, match=f"--attention is flashinfer, but it.*{reason}"):
            gpu_loading.device_variants(runner, asked)
    assert gpu_loading.device_variants(runner, replace(asked, attention="auto")).shapes.rows
