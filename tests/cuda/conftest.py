"""The backend of CPU tensors for every test of the CUDA kernels: the host shim.

With VNEXT_KERNELS_ON=gpu the same tests run on a GPU: their tensors are carried there for each launch (see carried.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from carried import CarriedBackend, gpu_backend
from host_shim import HostBackend, HostLauncher, compiler

from vnext.kernels import contracts
from vnext.kernels.cuda import backends, compiled, operations
from vnext.kernels.table import Operations, checked, plain_operations

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # for rank_sums.py
ON_GPU = os.environ.get("VNEXT_KERNELS_ON") == "gpu"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels go: one folder for all processes of a run."""
    if compiler() is None:
        pytest.skip("no C++ compiler here: the CUDA kernels cannot be run on the host")
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def session_shim(request: pytest.FixtureRequest) -> Iterator[HostBackend | CarriedBackend]:
    """The sources as they are, at -O1, or on the GPU: -O2 compiles for longer, -O0 runs for longer than it saves."""
    backend = gpu_backend() if ON_GPU else HostBackend(request.getfixturevalue("libraries"), precompile=True)
    backends.use("cpu", lambda: backend)
    yield backend
    backends.leave("cpu")


@pytest.fixture
def shim(session_shim: HostBackend | CarriedBackend) -> HostBackend | CarriedBackend:
    """The backend with its plain order and one worker."""
    session_shim.order, session_shim.workers = 0, 1
    return session_shim


@pytest.fixture
def kernels(shim: HostBackend, monkeypatch: pytest.MonkeyPatch) -> Operations:
    """The GPU's row of the table, on the CPU."""
    functions = {
        function.__name__: checked(getattr(contracts, f"check_{function.__name__}"), function)
        for function in operations.FUNCTIONS
    }
    chosen = plain_operations()._replace(**functions)
    monkeypatch.setattr("vnext.models.loading.tensor_place.operations", lambda device_type: chosen)
    monkeypatch.setattr("vnext.runtime.rank.runner.serves", lambda *_: False)
    for module in ("layers.layers", "layers.head_layer", "families.llama_eagle3", "families.mimo"):
        monkeypatch.setattr(f"vnext.models.{module}.operations", lambda device_type: chosen)
    return chosen


@pytest.fixture
def from_cpp(shim: HostBackend) -> Iterator[HostLauncher]:
    """The compiled form of the operations, over the shim. The functions of rows.py and attention.py stay what they are."""
    if ON_GPU or not compiled.is_built():
        pytest.skip("launches of carried tensors go through Python" if ON_GPU else compiled.describe())
    launcher = HostLauncher(shim)
    with compiled.serving("cpu", launcher.launcher()):
        yield launcher
