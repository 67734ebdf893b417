"""Two results side by side, bounds on figures, and loads one after another up to the knee."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from chromium import BrowserPage
from test_bench_cli import Backend, SlowBackend, status

from vnext.commands.bench import sweep
from vnext.commands.bench.bounds import bounds_of, broken
from vnext.commands.bench.compare import compare
from vnext.commands.bench.server_runs import MeasurementFailed, ServerUnusable
from vnext.commands.bench.sweep import knee
from vnext.runtime.protocol.settings import SettingsError


def written(path: Path, slower: float = 1.0, count: int = 200, **more: object) -> Path:
    """A detailed result: TTFT about 100 ms times `slower`, five gaps of about 20 ms, and a request that failed."""
    random = np.random.default_rng(count + int(100 * slower))
    ttfts = (random.gamma(20, 0.005, count) * slower).tolist()
    result = {
        "ttfts": [*ttfts, 0.0], "itls": [*random.gamma(20, 0.001, (count, 5)).tolist(), []], "output_lens": [6] * count + [0],
        "errors": [""] * count + ["HTTP status 500"], "output_throughput": 100.0 / slower, "num_prompts": count + 1,
    }  # fmt: skip
    path.write_text(json.dumps(result | more))
    return path


def test_a_change_is_told_from_chance(tmp_path: Path) -> None:
    before, same, slow = (written(tmp_path / f"{share}", share) for share in (1.0, 1.01, 1.3))
    ratios, shown = compare(before, slow)
    assert ratios["ttft_mean_ms"] == pytest.approx(1.3, abs=0.06) and ratios["output_throughput"] == pytest.approx(1 / 1.3)
    by_name = {line.split()[0]: line for line in shown.splitlines()[1:]}
    assert "chance" not in by_name["ttft_mean_ms"] and "chance" in by_name["tpot_mean_ms"] and "draws" in shown
    assert "+" not in by_name["output_throughput"], "a figure without requests has no interval"
    assert "(may be chance)" in compare(before, same)[1].splitlines()[1]


def test_requests_are_drawn_whole(tmp_path: Path) -> None:
    """Gaps of a request belong together: few slow requests of many gaps say less than as many gaps alone would."""
    slow = [[0.1] * 200, *[[0.01] * 200] * 9]
    lists = {"ttfts": [0.1] * 10, "output_lens": [201] * 10, "errors": [""] * 10}
    for name, itls in (("a", [[0.01] * 200] * 10), ("b", slow)):
        (tmp_path / name).write_text(json.dumps(lists | {"itls": itls}))
    line = next(line for line in compare(tmp_path / "a", tmp_path / "b")[1].splitlines() if line.startswith("itl_mean"))
    assert "(may be chance)" in line


def test_a_change_from_nothing_has_no_percentage(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 3)):
        (tmp_path / name).write_text(json.dumps({"figures": {"failed": 0, "preempted": value}}))
    shown = {line.split()[0]: line.split()[-1] for line in compare(tmp_path / "a", tmp_path / "b")[1].splitlines()[1:]}
    assert shown == {"failed": "0.0%", "preempted": "-"}


def test_loads_that_differ_are_named_and_reports_compare_too(tmp_path: Path) -> None:
    shown = compare(written(tmp_path / "a"), written(tmp_path / "b", count=100))[1]
    assert "note: num_prompts is 201 there and 101 here" in shown
    for name, load in (("c", {"load": {"request_rate": 0.0}, "figures": {"failed": 0}}), ("d", {"failed": 1, "request_rate": "inf", "total_input_tokens": 9})):
        (tmp_path / name).write_text(json.dumps(load))
    assert "note" not in compare(tmp_path / "c", tmp_path / "d")[1], "the same rate, and what one of them does not say"
    for name, value in (("x", 2.0), ("y", 3.0)):
        (tmp_path / name).write_text(json.dumps({"figures": {"ttft_p50_ms": value, "failed": 0}, "load": {"request_rate": 4}}))
    ratios, shown = compare(tmp_path / "x", tmp_path / "y")
    assert ratios == {"ttft_p50_ms": 1.5} and "50.0%" in shown and "note" not in shown


@pytest.mark.parametrize("text", ["[1]", "no JSON", '{"ttfts": [1], "itls": [[1], [2]], "output_lens": [2], "errors": [""]}'])
def test_a_file_that_is_no_result_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "a").write_text(text)
    for argv in ([str(tmp_path / "a"), str(tmp_path / "none")], [str(tmp_path / "none"), str(tmp_path / "a")], ["one"]):
        assert status(["compare", *argv]) == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("form", "line"),
    [("md", r"| a\|<b |  | 1 |"), ("csv", "requests,1234567,"), ("html", '<tr><th scope="row">a|&lt;b</th><td></td><td>1</td></tr>')],
)
def test_files_become_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, line: str) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text('{"figures": {"ttft_p99_ms": 5.5, "requests": 1234567}}')
    other.write_text('{"figures": {"ttft_p99_ms": 7, "a|<b": 1}}')
    assert status(["report", str(one), str(other), "--format", form]) == 0
    shown = capsys.readouterr().out
    assert line in shown and len(shown.replace("</tr>", "\n").splitlines()) >= 4 and "src=" not in shown
    assert status(["report"]) == 2 and "name the files" in capsys.readouterr().err


RUNS = [{"load": load, "output_tokens_per_s": 90.0 * load, "ttft_p50_ms": 10.0, "ttft_p99_ms": 20.0 * load, "kind": "x"} for load in (1, 4)]


def pages(folder: Path) -> list[Path]:
    """Two detailed results, one with bounds and a name that is markup, and a sweep."""
    (folder / "sweep.json").write_text(json.dumps({"figures": {"knee_request_rate": 4.0}, "runs": RUNS}))
    known = {"median_ttft_ms": 100.0, "p99_ttft_ms": 180.0, "confidence_95": {"median_ttft_ms": [98.5, 101.5], "p99_ttft_ms": [150, None]}}
    return [written(folder / "a<b>&.json"), written(folder / "slow.json", 1.3, **known), folder / "sweep.json"]


def test_a_page_has_curves_and_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It parses as XML but for its doctype and its empty elements, and every curve ends where its figure says."""
    assert status(["report", *map(str, pages(tmp_path)), "--format", "html"]) == 0
    shown = capsys.readouterr().out
    found = ElementTree.fromstring(re.sub(r"<(meta|!doctype)[^>]*>", "", shown))
    titles = [each.text for each in found.iter("figcaption")]
    assert titles == ["Tokens a second", "Time to first token", "Time to first token", "Time per token after it",
                      "Time between two tokens", "Time of a request"]  # fmt: skip
    figures = list(found.iter("figure"))
    assert [len(each.findall(".//path[@class='curve']")) for each in figures] == [1, 2, 2, 2, 2, 2]
    tokens = [float(place) for place in re.findall(r" ([\d.]+)", figures[0].find(".//path[@class='curve']").get("d"))]
    assert tokens[0] == pytest.approx(100 * (1 - 90 / 400), abs=1) and tokens[-1] == pytest.approx(100 * (1 - 360 / 400), abs=1)
    assert figures[0].find(".//path[@class='worst']") is not None and figures[2].find(".//path[@class='worst']") is None
    assert [span.text or span[0].tail for span in figures[2].findall("figcaption/span")][1:] == ["a<b>&", "slow"]
    cells = {row[0].text: ["".join(cell.itertext()) for cell in row[1:]] for row in found.iter("tr")}
    assert cells["median_ttft_ms"] == ["", "10098.5 to 101.5", ""] and cells["p99_ttft_ms"][1] == "180150 to ?"
    assert cells["output_throughput"][:2] == ["100", "76.9231"] and cells["knee_request_rate"] == ["", "", "4"]
    assert "<script" not in shown and "http" not in shown.replace("HTTP", "")


def test_files_without_figures_make_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.json").write_text('{"figures": {}, "runs": [{"load": 1}, 5], "confidence_95": {}}')
    assert status(["report", str(tmp_path / "empty.json"), "--format", "html"]) == 0
    shown = capsys.readouterr().out
    assert "The files have no figures." in shown and "<figure>" not in shown
    assert status(["report", str(tmp_path / "empty.json")]) == 2 and "there is no figure in" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_the_page_whole(browser, tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int, scheme: str) -> None:
    assert status(["report", *map(str, pages(tmp_path)), "--format", "html"]) == 0
    (tmp_path / "page.html").write_text(capsys.readouterr().out)
    shown = BrowserPage(browser)
    shown.emulate(width, scheme)
    try:
        browser.get((tmp_path / "page.html").as_uri())
        assert not shown.barriers()
        wide, back, plot_widths = browser.execute_script(
            "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor,"
            " [...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().width)]"
        )
        assert wide <= width and len(plot_widths) == 6 and min(plot_widths) > 0.3 * width and not shown.complaints
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    finally:
        shown.emulate(0, "")


def test_bounds_hold_or_are_named() -> None:
    figures = {"ttft_p99_ms": 812.3, "ttft_p99.9_ms": 900.0, "e2e_mean_ms": 2000.0, "failed": 0.0, "output_tokens_per_s": 99.0}
    good = ["ttft.p99<1s", "ttft.p99.9<=900ms", "e2e.avg < 2001", "failed<=0", "output_tokens_per_s>=99", "ttft.p99>500us"]
    assert broken(bounds_of(good), figures) == []
    assert broken(bounds_of(["ttft.p99<500ms", "failed<1"]), figures) == ["ttft.p99<500ms does not hold: ttft_p99_ms is 812.3"]
    with pytest.raises(MeasurementFailed, match="there is no figure speed; there are ttft_p99_ms"):
        broken(bounds_of(["speed>1"]), figures)
    for text in ("ttft", "ttft<", "<5", "ttft.p99<5x", "ttft==5", "a<1.2.3"):
        with pytest.raises(SettingsError, match="write a figure and its bound"):
            bounds_of([text])


def test_bounds_decide_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written(tmp_path / name, share)) for name, share in (("a", 1.0), ("b", 1.3))]
    assert status(["compare", *files, "--assert", "ttft.p50<1.5", "output_throughput>0.7"]) == 0
    assert status(["compare", *files, "--assert", "ttft.p50<1.05"]) == 1
    assert "ttft.p50<1.05 does not hold: ttft_p50_ms is 1." in capsys.readouterr().err


def test_a_percentile_that_no_report_has_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("ttft.p98<1s", "ttft.p99.9<1s", "e2e.max<1s"):
        assert status(["serve", "--base-url", "http://127.0.0.1:9", "--assert", text]) == 2
        assert capsys.readouterr().err == f"vnext-bench: --assert {text}: of a time there are mean, p50, p90, p99.\n"
    assert status(["size", "8b", "--slo", "ttft.p98<1s"]) == 2 and "--slo ttft.p98<1s: of a time" in capsys.readouterr().err
    assert status(["serve", "--base-url", "http://127.0.0.1:9", "--assert", "ttft.median<1s", "failed<1"]) == 2
    assert "is it running?" in capsys.readouterr().err


def swept(backend: Backend, *argv: str) -> int:
    async def serve() -> int:
        async with TestServer(backend.app) as server:
            small = ["--num-prompts", "12", "--random-input-len", "4", "--random-output-len", "2"]
            return await asyncio.to_thread(status, ["sweep", "--base-url", str(server.make_url("")), *small, *argv])

    return asyncio.run(serve())


def test_a_sweep_finds_the_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that does one request in 50 ms: four at a time bring no more than one."""
    assert swept(SlowBackend(), "--concurrencies", "1,4", "--json", str(tmp_path / "report")) == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["figures"]["knee_concurrency"] == 1 and [run["load"] for run in report["runs"]] == [1, 4]
    assert "<- knee" in capsys.readouterr().out.splitlines()[1]


def test_a_sweep_that_ends_early_keeps_its_runs(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is gone in the second run: the first was measured."""
    real, seen = sweep.measured, []

    async def measured(*given):
        seen.append(given)
        if len(seen) > 1:
            raise ServerUnusable("it is gone")
        return await real(*given)

    monkeypatch.setattr(sweep, "measured", measured)
    assert swept(Backend(), "--concurrencies", "1,2", "--json", str(tmp_path / "report")) == 1
    assert [run["load"] for run in json.loads((tmp_path / "report").read_text())["runs"]] == [1]
    said = capsys.readouterr()
    assert said.err == "vnext-bench: the sweep ended at 2: it is gone\n" and "<- knee" in said.out


def test_rates_double_until_the_knee_is_past(tmp_path: Path) -> None:
    more = ["--num-prompts", "8", "--goodput", "e2el:1000000", "--json", str(tmp_path / "report"), "--rates", "50,400"]
    assert swept(Backend(), *more) == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["figures"]["knee_request_rate"] == 400 and report["figures"]["good_share"] == 1.0


def test_the_knee_by_its_definition() -> None:
    runs = [{"load": load, "output_tokens_per_s": tokens} for load, tokens in ((1, 10), (2, 20), (4, 31), (8, 36))]
    assert knee(runs, False) == 2 and knee(runs[:3], False) == 2, "11 of 20 is worth it, 5 of 31 is not"
    shares = [{"load": load, "good_share": share} for load, share in ((1, 1.0), (2, 0.95), (4, 0.5))]
    assert knee(shares, True) == 1 and knee(shares[2:], True) == 0


@pytest.mark.parametrize("text", ["1,x", "0", "4,2", "inf", "nan", "1,1"])
def test_loads_rise(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["sweep", "--rates", text]) == 2
    assert "write rising numbers" in capsys.readouterr().err


def test_an_engine_is_started_again_and_again(tmp_path: Path) -> None:
    small = ["--executor", "inproc", "--threads", "1", "--log", "off"]
    assert status(["startup", *small, "--repeats", "2", "--json", str(tmp_path / "report"), "--assert", "first_token.p50<60s"]) == 0
    figures = json.loads((tmp_path / "report").read_text())["figures"]
    assert figures["starts"] == 2 and figures["ready_p50_ms"] < figures["first_token_p50_ms"]
