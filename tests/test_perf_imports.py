"""Every program of perf/ and scripts/ can be loaded: a name that it takes from vnext is still there.

Programs that are run by hand, once a season, break unseen when what they measure moves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"llama_cpp", "openvino", "openvino_genai", "optimum", "vllm", "cupy", "agents", "instructor"}
"""Packages of the environments that some programs run in: other engines, clients, a GPU."""
LOAD = """
import importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py").replace("/", "."), name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, name.rpartition("/")[0])
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
    sys.path.pop(0)
"""


def failures(folder: Path, root: Path = ROOT) -> list[str]:
    names = sorted(str(path.relative_to(root)) for path in folder.rglob("*.py") if not path.name.startswith("__"))
    run = subprocess.run([sys.executable, "-c", LOAD, *names], cwd=root, capture_output=True, text=True, timeout=300)
    assert names and run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if not any(f"No module named '{each}'" in line for each in ELSEWHERE)]


@pytest.mark.parametrize("folder", ["perf", "scripts"])
def test_every_program_can_be_loaded(folder: str) -> None:
    assert failures(ROOT / folder) == []


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("from json import nowhere\n")
    (tmp_path / "elsewhere.py").write_text("import llama_cpp.nothing\n")
    [line] = failures(tmp_path, tmp_path)
    assert line.startswith("broken.py: ImportError: cannot import name 'nowhere'")
