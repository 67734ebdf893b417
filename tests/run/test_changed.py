"""Tests of changed.py: whatever a test imports or starts is behind its arrows, and a change chooses the tests that it can break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from changed import ALWAYS, EVERYTHING, ROOT, Tree, changed_since

FILES = {
    "vnext/__init__.py": "def __getattr__(name):\n    from vnext.api.llm import LLM\n",
    "vnext/api/llm.py": "from vnext.start import start\n",
    "vnext/start.py": "start = ['python', '-m', 'vnext.core.main']\n",
    "vnext/core/__init__.py": "",
    "vnext/core/main.py": "def run():\n    from vnext.core import loop\n",
    "vnext/core/loop.py": "",
    "vnext/kernels/table.py": "",
    "vnext/text/parts.py": "",
    "scripts/attack.py": "",
    "tests/helper.py": "from vnext.text.parts import parts\n",
    "tests/conftest.py": "import vnext.core.loop\n",
    "tests/docs/conftest.py": "GUIDE = 'docs/guide.md'\n",
    "tests/docs/test_guide.py": "",
    "tests/test_core.py": "from vnext import LLM\n",
    "tests/test_text.py": "import helper\n",
    "tests/test_patched.py": "TARGET = 'vnext.kernels.table.operations'\n",
    "tests/test_attack.py": "from attack import attack\n",
    "tests/test_named.py": "PLANTED = 'core/src/step.cpp'\n",
    "tests/test_tidy.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("vnext/core/loop.py", ["test_core"]),
        ("vnext/core/__init__.py", ["test_core"]),
        ("vnext/text/parts.py", ["test_text"]),
        ("vnext/kernels/table.py", ["test_patched"]),
        ("vnext/kernels/src/isa/level.cpp", ["test_patched"]),
        ("vnext/core/src/step.cpp", ["test_core", "test_named"]),
        ("scripts/attack.py", ["test_attack"]),
        ("tests/helper.py", ["test_text"]),
        ("tests/test_text.py", ["test_text"]),
        ("docs/guide.md", ["docs/test_guide"]),
        ("docs/other.md", ["docs/test_guide"]),
        ("README.md", []),
        ("vnext/core/gone.py", []),
    ],
)
def test_a_change_chooses_what_reaches_or_names_it(tree: Tree, changed: str, chosen: list[str]) -> None:
    assert tree.chosen([changed]) == [f"tests/{name}.py" for name in sorted([*chosen, "test_tidy"])]


@pytest.mark.parametrize("changed", ["setup.py", "vnext/__init__.py", "tests/conftest.py"])
def test_some_files_choose_all(tree: Tree, changed: str) -> None:
    assert tree.chosen([changed, "README.md"]) == ["tests"]


def test_what_differs_is_what_was_committed_edited_removed_or_added(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("same", "edited", "removed", "committed"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "1")
    git("checkout", "-b", "mine")
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "2")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "removed").unlink()
    (tmp_path / "added").write_text("1")
    assert changed_since(tmp_path, "main") == {"committed", "edited", "removed", "added"}


# ---- the tree itself ---------------------------------------------------------------------------------------------

LOADED = """
import importlib, sys
from pathlib import Path
sys.path[:0] = {paths!r}
importlib.import_module({module!r})
print(*(each.__file__ for name, each in sys.modules.items() if name.split(".")[0] == "vnext" and each.__file__))
"""


@pytest.fixture(scope="module")
def own() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("test", ["tests/state/test_pins.py", "tests/server/answers/test_tools.py", "tests/replay/rerun/test_exec.py"])
def test_all_that_a_test_loads_is_behind_its_arrows(own: Tree, test: str) -> None:
    path = ROOT / test
    folders = [str(folder) for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
    helpers = [str(ROOT / "tests" / room) for room in ("runtime", "models", "replay")]
    program = LOADED.format(paths=[str(ROOT), *folders, *helpers], module=path.stem)
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    loaded = {str(Path(name).relative_to(ROOT)) for name in ran.stdout.split() if name.endswith(".py")}
    assert len(loaded) > 20 and loaded - own.reached(test) - {*EVERYTHING} == set()


def test_an_engine_s_processes_are_behind_a_server(own: Tree) -> None:
    reached = own.reached("tests/e2e/test_server_life.py")
    for part in ("engine/main", "rank/main"):
        assert any(name.startswith("vnext/") and name.endswith(f"{part}.py") for name in reached), part


def test_a_change_chooses_a_part_of_the_tree(own: Tree) -> None:
    chosen = own.chosen(["tests/engine_here.py"])
    assert {*ALWAYS, "tests/e2e/test_determinism.py"} < {*chosen} and len(chosen) < len(own.tests) / 3
