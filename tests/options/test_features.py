"""The table of what goes together says what a start refuses: each cross has its sentence, and engines start where there is none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from vnext import LLM, SamplingParams
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused
from vnext.runtime.protocol.settings import SettingsError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from docs_features import FEATURES, MODELS, features, refusal, refused_together  # noqa: E402  (needs the path above)

STARTED = ("stages", "drafts from texts", "packed weights", "the disk tier", "LoRA")
"""Features that the demo model can show."""


def test_each_feature_alone_is_served_on_a_cpu() -> None:
    assert {name: refusal({"device": "cpu", **own}) for name, own in FEATURES.items()} == dict.fromkeys(FEATURES, "")


def test_the_table_is_the_same_both_ways_and_each_cross_has_a_sentence() -> None:
    found = refused_together()
    assert all(bool(why) is bool(found[other, name]) for (name, other), why in found.items())
    assert all(re.search(r"leave |one value$|use |take |add |give ", why) for why in found.values() if why)
    rows = dict(re.findall(r"^\|(?:\d+ )?([a-zA-Z][^|]*)((?:\|[x ])*)\|$", features(), re.MULTILINE))
    assert list(rows) == [*FEATURES, *MODELS]
    crosses = {name: [cell == "x" for cell in cells[1::2]] for name, cells in rows.items()}
    for name, cells in crosses.items():
        before = list(FEATURES)[: [*FEATURES, *MODELS].index(name)]
        assert [bool(found[name, other]) for other in before] == cells + [False] * (len(before) - len(cells)), name


@pytest.mark.parametrize("name", STARTED[1:])
def test_an_engine_says_what_the_table_says(tmp_path: Path, name: str) -> None:
    """Stages beside another feature: a start, or the very sentence."""
    own = FEATURES[STARTED[0]] | FEATURES[name]
    own |= {field: str(tmp_path / field) for field in ("kv_disk_dir", "packed_weights_dir") if field in own}
    why = refused_together()[STARTED[0], name]
    if why:
        with pytest.raises((StartRefused, SettingsError)) as refused:
            LLM(str(DEMO_MODEL), device="cpu", threads=1, log="off", **own)
        assert why.split(":")[0] in str(refused.value)
        return
    with LLM(str(DEMO_MODEL), device="cpu", threads=1, log="off", **own) as llm:
        (answer,) = llm.generate("def f(x):", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4
