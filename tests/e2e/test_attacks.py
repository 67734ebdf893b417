"""What one client sends does not stop the others: the attacks of scripts/attack_server.py and
attack_guarded.py, each for a moment, and what is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import ROOT

sys.path.append(str(ROOT / "scripts"))

from attack_guarded import ATTACKS as GUARDED, KEY, REQUESTS_PER_MINUTE  # noqa: E402
from attack_server import ATTACKS, attacked, serving  # noqa: E402  (needs the path above)

FAR_TOO_LONG_MS = 4_000  # a stop of seconds; perf/records has what an idle machine takes
GROWTH_BYTES = 150 * 2**20
FAILS = {"connections": "closed", "a batch of": "in_progress", "line": "failed", "forms": "400"}
"""A word in the name of an attack -> what its attacker gets, where it is no answer."""
ADMITTED = ("none", "256 prompts of 2 kB", "256 prompts of 1,000 ids", "/detokenize of 65,536 ids, 3 senders")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    with serving(ROOT, Path(tmp_path_factory.mktemp("attacked"))) as running:
        yield running


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_and_memory_comes_back(server: tuple[str, psutil.Process], name: str) -> None:
    found = attacked(server, ATTACKS[name], 0.5)
    assert found["health"]["p99"] < FAR_TOO_LONG_MS and found["gaps"]["p99"] < FAR_TOO_LONG_MS
    assert found["rss_after"] - found["rss_before"] < GROWTH_BYTES
    assert set(found["got"]) == expected(name), found["got"]


@pytest.mark.parametrize("name", [name for name in GUARDED if name != "none"])
def test_who_has_no_key_or_secret_or_a_key_with_limits_stops_nobody(tmp_path: Path, name: str) -> None:
    serve, attack = GUARDED[name]
    with serve(ROOT, tmp_path) as running:
        processes = set(running[1].parent().children(recursive=True))
        found = attacked(running, attack, 0.5, KEY)
        assert set(running[1].parent().children(recursive=True)) == processes, "nothing has ended"
    assert found["health"]["p99"] < FAR_TOO_LONG_MS and found["gaps"]["p99"] < FAR_TOO_LONG_MS
    assert found["rss_after"] - found["rss_before"] < GROWTH_BYTES
    got = found["got"]
    assert got.pop("answered", 0) <= REQUESTS_PER_MINUTE
    assert set(got) == {next((what for word, what in FAILS.items() if word in name), "200")}, got


def expected(name: str) -> set[Any]:
    """What the attacker gets."""
    if name == "none":
        return set()
    return {"closed"} if "idle" in name else {"200"} if name in ADMITTED else {"400"}
