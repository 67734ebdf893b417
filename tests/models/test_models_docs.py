"""docs/models.md tells the truth: its table is the registry, its example is the file."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.hosted.their_cases import CASES, SOUND_CASES
from vnext.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text()


def test_the_table_is_the_registry() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \|", TEXT, flags=re.MULTILINE)
    found = {name: file.replace("/", ".") for file, names in rows for name in re.findall(r"[\w*]+", names)}
    seen = {name for name, file in found.items() if file == "hosted.seeing"}
    own = {name: file for name, file in found.items() if name not in seen}
    assert own == {name.removesuffix("ForCausalLM").replace("ForConditionalGeneration", "*"): file for name, file in FAMILIES.items()}
    assert seen == {f"{case.name}*" for case in (*CASES.values(), *SOUND_CASES.values())}
    for file in ("README.md", "CHANGELOG.md"):
        assert re.findall(r"(\d+) \[?architectures", (ROOT / file).read_text()) == [str(len(FAMILIES))]


def test_the_example_is_the_file() -> None:
    example = TEXT.split("```python\n")[1].split("```")[0]
    assert (ROOT / "examples" / "family.py").read_text() == example
