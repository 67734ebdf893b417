"""req in milliseconds: how long a request waited, for what, and who had the engine meanwhile; logs of known incidents."""

from __future__ import annotations

import incidents
import pytest

from vnext.replay.answers.request_life import life
from vnext.replay.causes.helping import recorded
from vnext.replay.causes.ledger import ledger
from vnext.replay.cli.main import main
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log


@pytest.mark.parametrize(
    ("name", "request_id", "line"),
    [
        ("paused", 25, "first token after 2,101 ms, end after 3,123 ms: 1,999 ms waited for the end of a pause"),
        ("tiny_cache", 30, "first token after 1,740 ms, end after 2,285 ms: 1,656 ms waited for free blocks"),
        ("long_prompts", 29, "first token after 1,738 ms, end after 3,061 ms: 1,433 ms waited for the token budget "
         "(--max-num-batched-tokens), while request 27 had 42% of the tokens"),
        ("slow_client", 3, "first token after 17 ms, end after 419 ms: it did not wait"),
    ],
)  # fmt: skip
def test_the_first_line_has_the_time_and_the_cause(tmp_path, capsys, name, request_id, line) -> None:
    incidents.record(tmp_path, name)
    assert main(["req", str(tmp_path / name), str(request_id)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line


def test_a_request_that_no_token_has_reached_yet_has_a_first_line_too(tmp_path, capsys) -> None:
    """As of an engine that runs: request 101 has waited since step 261, and would until step 846."""
    incidents.record(tmp_path, "noisy")
    assert main(["cut", str(tmp_path / "noisy"), "0", "700", "-o", str(tmp_path / "cut")]) == 0
    capsys.readouterr()
    assert main(["req", str(tmp_path / "cut"), "101"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "no token in 6,384 ms: 6,381 ms waited for sequences (--max-num-seqs), "
        "while client 7b96e314 had 99% of the tokens (most for request 42)"
    )


def test_who_had_the_engine_meanwhile(tmp_path) -> None:
    """The reason is that of the request ahead, and times add up to no more than the first token's."""
    incidents.record(tmp_path, "noisy")
    found = life(Index(open_log(tmp_path / "noisy")), 101).waited
    assert (found.client, next(iter(found.by_reason))) == ("7b96e3145ad8f02c", "sequences") and found.client_share > 0.9
    assert 0.95 * found.first_ms < sum(found.by_reason.values()) < found.first_ms


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
def test_a_log_whose_last_times_are_still_to_come_has_no_time_before_another(tmp_path, kept) -> None:
    """As of an engine that runs: its times are written a block at a time, behind its steps."""
    incidents.record(tmp_path, "noisy")
    whole = ledger(open_log(tmp_path / "noisy"), lambda _: True)
    for times in (tmp_path / "noisy").glob("*.vnexttimes"):
        times.write_bytes(times.read_bytes()[: int(kept * times.stat().st_size)])
    written = ledger(open_log(tmp_path / "noisy"), lambda _: True)
    known = [life for life in written.lives.values() if life.first_us is not None]
    assert 0 < len(known) < len(whole.lives) and any(life.ended_us is None for life in known)
    assert all(life.last_us is not None and life.came_us <= life.first_us <= life.last_us for life in known)
    assert 0 < recorded(written).whole <= 1.2 * recorded(whole).whole
