"""The host shim as the backend of CPU tensors, for every test of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from host_shim import HostBackend, compiler

from vnext.kernels.cuda import backends


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels go."""
    if compiler() is None:
        pytest.skip("no C++ compiler here: the CUDA kernels cannot be run on the host")
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def session_shim(libraries: Path) -> Iterator[HostBackend]:
    """The sources as they are, at -O2."""
    backend = HostBackend(libraries, precompile=True)
    backends.use("cpu", lambda: backend)
    yield backend
    backends.leave("cpu")


@pytest.fixture
def shim(session_shim: HostBackend) -> HostBackend:
    """The backend with its plain order and one worker."""
    session_shim.order, session_shim.workers = 0, 1
    return session_shim
