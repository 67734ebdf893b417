"""With MKL_CBWR set, a token's logits do not depend by a bit on its batch mates or on how its prompt was cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["llama_invariance.py", "family_invariance.py", "plain_invariance.py"])
def test_logits_are_bitwise_invariant(name: str) -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL, whose MKL_CBWR makes products independent of the number of rows")
    level = "AVX512" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "AVX2"
    settings = {"MKL_CBWR": f"{level},STRICT", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    environment = {**os.environ, **settings}
    program = [sys.executable, str(HERE / name)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "invariant" in done.stdout, done.stderr
