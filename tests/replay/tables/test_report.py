"""report: the page says what explain, slow and clients say, loads nothing, and is readable in a browser, wide and narrow."""

from __future__ import annotations

import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chromium import BrowserPage
from log_drive import record

from tests.replay.log_answers import answer
from vnext.replay.causes.explain import Asked, explained, lines_of
from vnext.replay.cli.main import main
from vnext.replay.console.ended import Ended
from vnext.replay.tables import plots
from vnext.replay.tables.report import report
from vnext.state.events import RequestArrived

sys.path.append(str(Path(__file__).resolve().parents[1] / "causes"))

import incidents  # noqa: E402  (needs the path above)

VOID = {"meta", "br"}
HOSTILE = "<script>alert('x')</script>\x1b[31m"


@pytest.fixture(scope="module", params=["disk_stall", "noisy"])
def log(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("incidents")
    incidents.record(folder, request.param)
    return folder / request.param


@pytest.fixture(scope="module")
def page(log: Path) -> str:
    report(log, log.with_suffix(".html"), Asked())
    return log.with_suffix(".html").read_text()


class Tags(HTMLParser):
    """Checks that tags are closed in order; collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> str:
    """The page's text without tags."""
    tags = Tags()
    tags.feed(page)
    assert not tags.open and not tags.loads and "url(" not in page and "@import" not in page
    return html.unescape(re.sub(r"<[^>]*>", "\n", page))


def test_the_page_says_what_explain_slow_and_clients_say(log, page, capsys) -> None:
    text, said = checked(page), explained(log)
    assert said.headline in text and all(line in text for _, line in lines_of(said))
    slow = answer(capsys, "slow", log)[1]
    heading = f"The worst step: {slow['steps'][0]['step']}\n"
    assert heading in text and f"took {slow['steps'][0]['ms']:,.1f} ms" in text
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    slowest = next(place for place, row in enumerate(rows) if len(row) == 11)
    assert [int(row[0]) for row in rows[slowest : slowest + 3]] == [each["id"] for each in slow["firsts"][:3]]
    found = answer(capsys, "clients", log)[1]["clients"]
    assert [row[0] for row in rows if len(row) == 8] == [each["client"][:8] for each in found]


def test_a_part_is_about_its_time(log, tmp_path, capsys) -> None:
    code, found = answer(capsys, "report", log, "-o", tmp_path / "part.html", "--at", "+2.5")
    assert code == 0 and explained(log, Asked(at="+2.5")).headline == found["headline"]
    assert found["headline"] in checked((tmp_path / "part.html").read_text())


def named(events, state_digest, ranks):
    events = [msgspec.structs.replace(each, name=f"{HOSTILE}{each.id}") if isinstance(each, RequestArrived) else each for each in events]
    return events, state_digest, ranks


def test_a_name_is_shown_and_not_run(tmp_path) -> None:
    report(record(tmp_path / "log", change=named), tmp_path / "page.html", Asked())
    text = checked((tmp_path / "page.html").read_text())
    assert "<script>alert('x')</script>?[31m" in text and "The log has no times" in text


@pytest.mark.parametrize("arrivals", [0, 1])
def test_a_log_of_little_has_a_page(tmp_path, capsys, arrivals) -> None:
    code, found = answer(capsys, "report", record(tmp_path / "log", arrivals=arrivals, timestamped=True), "-o", tmp_path / "page.html")
    assert code == 0 and found["requests"] == arrivals
    words = "no step was computed: 1 request came, and none was served" if arrivals else "no request came"
    assert words in checked((tmp_path / "page.html").read_text())


def test_damage_is_told(tmp_path, capsys) -> None:
    log_dir = record(tmp_path / "log", timestamped=True)
    path = next(log_dir.glob("*.vnextlog"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, found = answer(capsys, "report", log_dir, "-o", tmp_path / "page.html")
    assert code == 1 and found["ended"].startswith("damaged") and found["ended"] in checked((tmp_path / "page.html").read_text())


def test_a_file_that_cannot_be_written_has_one_sentence(log, tmp_path, capsys) -> None:
    assert main(["report", str(log), "-o", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_damage_is_the_headline(log, tmp_path) -> None:
    end = Ended(kind="damaged", line="damaged at frame 7: a record's checksum is wrong")
    found = report(log, tmp_path / "page.html", Asked(), end)
    assert found.headline.startswith("the log is damaged behind step ")
    assert f"<h1>{found.headline}</h1>" in (text := (tmp_path / "page.html").read_text()) and html.escape(end.line) in text


# ---- plots -------------------------------------------------------------------------------------------------------

AXIS = plots.Axis(0.0, 100.0, str, np.nan, (np.nan, np.nan))


def heights(drawn: str) -> list[float]:
    return [float(each) for each in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", drawn.partition('class="curve"')[2].partition("/>")[0])]


@pytest.mark.parametrize(("extreme", "spike"), [(np.maximum, 9.0), (np.minimum, 1.0)])
def test_one_extreme_of_thousands_is_drawn(extreme: np.ufunc, spike: float) -> None:
    values = np.full(10_000, 5.0)
    values[7_777] = spike
    found = heights(plots.curves("t", "u", AXIS, np.linspace(0, 100, 10_000), [plots.Curve("c", "steps", values, extreme)]))
    assert len(found) == plots.BUCKETS and len(set(found)) == 2
    assert round(100 * (0.7777 - 0.5 / plots.BUCKETS)) == round(100 * found.index((min if spike > 5 else max)(found)) / plots.BUCKETS)


def test_a_long_step_is_drawn_from_its_begin_on() -> None:
    found = heights(plots.curves("t", "u", AXIS, np.array([1.0, 50.0, 100.0]), [plots.Curve("c", "steps", np.array([1.0, 10.0, 1.0]))]))
    high = [place for place, height in enumerate(found) if height == min(found)]
    assert high == list(range(high[0], high[-1] + 1)) and 0.45 < len(high) / plots.BUCKETS < 0.5


@pytest.mark.parametrize(("most", "top", "count"), [(0.0, 1.0, 2), (7.0, 8.0, 5), (92.1, 100.0, 3), (1e-3, 1e-3, 3), (4096, 6000, 4)])
def test_a_scale_has_round_numbers(most: float, top: float, count: int) -> None:
    found, ticks = plots._scale(most)
    assert found == pytest.approx(top) and len(ticks) == count and ticks[0] == 0


# ---- a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_it_whole(browser, log, page, width: int, scheme: str) -> None:
    shown = BrowserPage(browser)
    shown.emulate(width, scheme)
    try:
        browser.get(log.with_suffix(".html").as_uri())
        assert shown.text("h1").lower() == explained(log).headline.lower() and not shown.complaints
        assert not shown.barriers()
        wide, back, plot_widths = browser.execute_script(
            "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor,"
            " [...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().width)]"
        )
        assert wide <= width and len(plot_widths) == 4 and min(plot_widths) > 0.35 * width
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    finally:
        shown.emulate(0, "")
