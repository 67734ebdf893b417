"""The GPU behind the interface of `device.py`: streams, events, graphs, pinned memory, memory figures.

Owns the two streams of a rank. The work has its own stream, which becomes the process's current one: kernels ask torch for the
current stream at each launch, and the default stream cannot be captured. Decides nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from vnext.runtime.gpu.device import Mark, Memory, recording
from vnext.runtime.protocol.settings import SettingsError


class CudaMark:
    """An event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def event_of(mark: Mark) -> torch.cuda.Event:
    """The event of a mark of this device."""
    assert isinstance(mark, CudaMark)
    return mark.event


class CudaGraph:
    """A CUDA graph. All graphs of a device share one memory pool: none reads another's leftovers there.

    Python collects no garbage during a capture: what a cycle frees then, an event or a graph, would break it.
    """

    def __init__(self, pool: torch.cuda._POOL_HANDLE) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()
        self._collects = False

    def begin(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._collect()
            raise

    def end(self) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._collect()

    def _collect(self) -> None:
        if self._collects:
            gc.enable()

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """GPU number `index` as this process's device. Raises SettingsError where there is none."""

    def __init__(self, index: int) -> None:
        require_gpu(index)
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._work, self._copies = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.set_stream(self._work)
        self._pool = torch.cuda.graph_pool_handle()
        self._first_graph: CudaGraph | None = None  # torch refuses a pool whose graphs have all gone

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        return self.beside(lambda: target.copy_(source, non_blocking=True), after)

    def beside(self, copy: Callable[[], object], after: Mark | None) -> Mark:
        if after is not None:
            self._copies.wait_event(event_of(after))
        with torch.cuda.stream(self._copies):
            copy()
        return CudaMark(self._copies)

    def join(self, mark: Mark) -> None:
        self._work.wait_event(event_of(mark))

    def mark(self) -> Mark:
        return CudaMark(self._work)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """Copies on the work's stream: they are a few hundred bytes, and later work may write to the sources."""
        targets = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for target, tensor in zip(targets, tensors):
            target.copy_(tensor, non_blocking=True)
        return targets, CudaMark(self._work)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Upload from pinned memory, which torch keeps until the copy is done."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def graph(self) -> CudaGraph:
        torch.cuda.synchronize()
        if self._first_graph is None:
            first = CudaGraph(self._pool)
            with recording(first):
                torch.zeros(1, device=self.torch_device)
            self._first_graph = first
        return CudaGraph(self._pool)

    def free_unused(self) -> None:
        torch.cuda.empty_cache()

    def begin_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> Memory:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return Memory(total, free, torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())


def require_gpu(index: int) -> None:
    """Raise SettingsError, one sentence with the remedy, unless torch can use GPU number `index`."""
    if torch.version.cuda is None:
        raise SettingsError(
            f"--device is cuda, but this torch ({torch.__version__}) was built without CUDA: install one that was, or use "
            "--device cpu"
        )
    if not torch.cuda.is_available():
        raise SettingsError(
            "--device is cuda, but torch finds no GPU here: see that a driver runs (nvidia-smi), or use --device cpu"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"--tensor-parallel-size asks for one GPU a rank and there is none for rank {index}: this machine has {count}"
        )
