"""With MKL_CBWR set, a token's logits do not depend by a bit on its batch mates or on how its prompt was cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vnext.runtime.processes.determinism import cpu_flags, has_strict_path, mkl_branch

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["llama_invariance.py", "family_invariance.py", "plain_invariance.py"])
def test_logits_are_bitwise_invariant(name: str) -> None:
    strict = torch.backends.mkl.is_available() and has_strict_path(cpu_flags())
    if name.startswith("plain") and not strict:
        pytest.skip("torch's own products depend on the number of rows without MKL on an Intel processor")
    settings = {"MKL_CBWR": mkl_branch(cpu_flags()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    environment = {**os.environ, **settings}
    program = [sys.executable, str(HERE / name)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "invariant" in done.stdout, done.stderr
