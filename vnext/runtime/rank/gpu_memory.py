"""Memory of a GPU: how much of it the cache may take, from a trial of the largest step.

Owns the rule, which is pure, and the trial. Memory that is neither free nor held by torch belongs to others: other programs,
the driver, libraries.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.thin_tiles import ThinTiles, make_tiles
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.models.layers.kv_cache import kv_groups
from vnext.runtime.gpu.device import Device, Memory
from vnext.runtime.gpu.row_parameters import parameter_bytes
from vnext.runtime.protocol.settings import SettingsError
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import Choose, report_in_parts
from vnext.state.params import CHOOSING, LOGPROBS_MAX, PARAMETERS, ROW_DTYPES

GRAPH_BYTES = 512 * 2**20
"""Reserved for graphs: their results, and the nodes of each graph on the device."""
GIB = 2**30
LOGIT_BYTES = 4


def reserved_bytes(row_count: int, vocab_size: int, graph_rows: int) -> int:
    """Bytes that a rank's steps hold beside the model: row parameters and, with graphs of at most `graph_rows` query rows, their
    memory and one step's logits."""
    graphs = GRAPH_BYTES + graph_rows * vocab_size * LOGIT_BYTES if graph_rows else 0
    return parameter_bytes(row_count, vocab_size) + graphs


def cache_bytes(memory: Memory, utilization: float, trial_bytes: int, reserve: int) -> int:
    """Bytes for keys and values: the share of the memory, less other programs' memory, the step's peak and a reserve.

    `trial_bytes` is the trial's own cache, which the peak includes. Raises SettingsError where nothing is left.
    """
    others = memory.total - memory.free - memory.cached
    left = int(memory.total * utilization) - others - (memory.peak - trial_bytes) - reserve
    if left <= 0:
        raise SettingsError(
            f"--gpu-memory-utilization {utilization:g} of {memory.total / GIB:.1f} GiB leaves no memory for the cache: other "
            f"programs hold {others / GIB:.1f}, the model and its largest step {(memory.peak - trial_bytes) / GIB:.1f}, rows and "
            f"graphs {reserve / GIB:.1f}; raise it, lower --max-num-batched-tokens, or use more GPUs"
        )
    return left


@torch.inference_mode()
def try_largest_step(
    runner: ModelRunner, device: Device, choose: Choose, tokens: int, rows: int, block_size: int
) -> tuple[Memory, int]:
    """Compute a step of `tokens` tokens in `rows` rows, all of them sampled from adjusted logits and reported. Returns the
    memory it took and the bytes of its own cache."""
    rows = min(rows, tokens)
    device.begin_peak()
    batch, pages = trial_batch(tokens, rows, block_size, len(kv_groups(runner.config).windows), device.torch_device)
    model = runner.device_model(pages, block_size)
    if runner.regions is not None:  # an empty one, for which the kernels take as much memory as for any
        parts = make_tiles([(0, np.arange(tokens))])
        batch = batch._replace(tiles=ThinTiles(*(torch.from_numpy(part).to(device.torch_device) for part in parts)))
    logits = model.logits(model.hidden(batch))
    changed = logits.clone()
    report_in_parts(logits, choose(changed, trial_sampling(rows, device.torch_device)), LOGPROBS_MAX)
    del logits, changed
    page_bytes = runner.own_block_bytes(block_size) + (runner.head.block_bytes(block_size) if runner.head else 0)
    return device.memory(), (pages + 1) * page_bytes


def trial_batch(tokens: int, rows: int, block_size: int, groups: int, device: torch.device) -> tuple[ForwardBatch, int]:
    """`tokens` tokens shared among `rows` rows, from position 0 on, and the number of pages they need."""
    counts = np.full(rows, tokens // rows, dtype=np.int64)
    counts[: tokens % rows] += 1
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(tokens) - np.repeat(starts[:-1], counts)
    width = -(-int(counts.max()) // block_size)
    owners = np.repeat(np.arange(rows), counts)

    def places(group: int) -> GroupPlaces:
        table = (np.arange(rows * width).reshape(rows, width) * groups + group).astype(np.int32)
        slots = table[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return GroupPlaces(sent(slots), sent(table))

    def sent(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    first, *others = [places(group) for group in range(groups)]
    host = HostBatch(starts.astype(np.int32), counts.astype(np.int32))
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        ids, sent(positions), first.slots, sent(host.query_starts), sent(host.context_lengths), first.block_table,
        sent(starts[1:] - 1), host=host, groups=tuple(others),
    )  # fmt: skip
    return batch, rows * width * groups


def trial_sampling(rows: int, device: torch.device) -> SamplingInputs:
    """Sampling inputs in which every row uses all filters."""

    def column(value: float, dtype: str) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch_dtype(dtype), device=device)

    usual = {name: PARAMETERS[name].tried for name in CHOOSING} | {"seed": 1, "position": 1}
    return SamplingInputs(**{name: column(value, ROW_DTYPES[name]) for name, value in usual.items()})
