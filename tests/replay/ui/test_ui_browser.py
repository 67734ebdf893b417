"""The scrubber in a real browser: keys, buttons, addresses, hover, two logs, light and dark, and nothing in its console."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from chromium import WAIT_S, BrowserPage
from log_drive import record, small_config

from vnext.replay import Log
from vnext.replay.answers.diff import diff
from vnext.replay.answers.slow import slow
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.replay.ui.app import explained, lanes
from vnext.replay.ui.overview import Overview
from vnext.replay.ui.walk import Walk

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.action_builder import ActionBuilder  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests" / "e2e"))

from serving import Server, complete_all, serving  # noqa: E402  (needs the path above)

SPAN, LABEL, LANE = 90, 58, 15  # lanes.js: steps in view, pixels before the first one, pixels of a lane


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[Path]:
    """Two runs of one engine: the second one's clients go on when the first one's have stopped."""
    folder = tmp_path_factory.mktemp("browser")
    config = small_config(page_count=15)
    return [record(folder / f"run-{count}", config=config, seed=3, arrivals=count, size=4000) for count in (60, 70)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def scrubber(request, browser, logs) -> Iterator[Page]:
    """One process for all tests that look at the same logs."""
    with shown(browser, *logs[: request.param]) as found:
        yield found


@pytest.fixture
def page(browser, scrubber) -> Page:
    return Page(browser, scrubber.address, scrubber.logs)


@contextmanager
def shown(browser, *logs: Path, code: int = 0) -> Iterator[Page]:
    command = [sys.executable, "-m", "vnext.replay", "ui", *map(str, logs), "--json"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield Page(browser, json.loads(served.stdout.readline())["address"], len(logs))
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == code


class Page(BrowserPage):
    """The scrubber."""

    def __init__(self, driver, address: str, logs: int) -> None:
        super().__init__(driver)
        self.address, self.logs = address, logs

    def open(self, step: int) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#step={step}")
        self.at(step)

    def at(self, step: int) -> None:
        """Wait until every log shows this step."""
        shown = f"return [...document.querySelectorAll('.log')].map(s => s.dataset.step).join() === '{','.join([str(step)] * self.logs)}'"
        try:
            WebDriverWait(self.driver, WAIT_S).until(lambda driver: driver.execute_script(shown))
        except TimeoutException:
            raise AssertionError(f"step {step} is not shown: {self.text('#where')} {self.text('#error')}") from None
        assert self.text("#where").startswith(f"step {step} of")

    def point(self, element, place: tuple[int, int], hint: str, words: str) -> None:
        """Move the pointer about this place until the hint begins so: what is drawn later moves what lies below it."""
        right = 0

        def says(driver) -> bool:
            nonlocal right
            right = 1 - right
            ActionChains(driver, 1).move_to_element_with_offset(element, place[0] + right, place[1]).perform()
            return self.text(hint).startswith(words)

        WebDriverWait(self.driver, WAIT_S).until(says)

    def colours(self, selector: str) -> int:
        """How many different colours a canvas has."""
        return self.driver.execute_script(
            "const c = document.querySelector(arguments[0]);"
            "const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
            "return new Set(d).size;", selector,
        )  # fmt: skip


def test_keys_and_addresses_lead_to_steps(page):
    page.open(40)
    page.press(Keys.ARROW_RIGHT)
    page.at(41)
    page.press(Keys.ARROW_LEFT)
    page.at(40)
    page.press(Keys.HOME)
    page.at(0)
    assert page.driver.current_url.endswith("#step=0")
    page.press("/", "step 25", Keys.ENTER)
    page.at(25)
    page.press("/", "nonsense", Keys.ENTER)
    WebDriverWait(page.driver, WAIT_S).until(lambda _: '"nonsense" is no place' in page.text("#error"))
    page.driver.find_element(By.ID, "on").click()
    page.at(26)
    assert page.text("#error") == ""
    assert page.complaints == []


def test_it_opens_at_the_slowest_step_and_leads_to_the_others(page, logs):
    told = slow(Index(open_log(logs[0])), 6)
    page.driver.get("about:blank")
    page.driver.get(page.address)
    page.at(told.steps[0].step)
    assert f"slowest: step {told.steps[0].step} with" in page.text(".slowest summary")
    page.find(".slowest summary").click()
    lines = page.driver.find_elements(By.CSS_SELECTOR, ".log:first-child .slowest button")
    assert len(lines) == 18 and f"request {told.firsts[2].id}," in lines[6 + 2].text
    lines[6 + 2].click()
    page.at(told.firsts[2].step)
    assert page.complaints == []


def test_the_time_line_says_when_and_how_long(browser, tmp_path):
    timed = record(tmp_path / "log", config=small_config(page_count=15), seed=3, arrivals=60, timestamped=True)
    with shown(browser, timed) as page:
        page.open(30)
        page.reported(".facts", "running in this step")
        canvas = page.find("canvas.line")
        ActionChains(browser, 1).move_to_element(canvas).perform()
        found = re.fullmatch(r"step (\d+), (\d\d:\d\d:\d\d), ([\d.]+) ms step time, .*", canvas.get_attribute("title"))
        assert found, canvas.get_attribute("title")
        steps = Log(timed).steps
        place = steps["step"].tolist().index(int(found[1]))
        ended = {f"{datetime.fromtimestamp(steps['ended'][place] + off, UTC):%H:%M:%S}" for off in (-1, 0)}
        assert found[2] in ended and float(found[3]) == pytest.approx(steps["ms"][place], abs=0.06)
        assert page.complaints == []


def test_a_request_is_found_by_its_name(page, logs):
    page.open(0)
    page.press("/", "secret name 25", Keys.ENTER)
    walk = Walk(Index(open_log(logs[0])))
    step = next(each for each in range(walk.last_step) if walk.moment(each).after.next_id > 25)
    page.at(step)
    assert "secret name" in page.text("table.rows")
    page.press("/", "nobody", Keys.ENTER)
    page.reported("#error", '"nobody" is no place: no request of this log has a name')


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_it_is_as_wide_as_the_screen(page, width):
    page.emulate(width, "dark")
    try:
        page.open(40)
        page.find(".slowest summary").click()
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
        lines = page.driver.execute_script("return document.querySelector('header').offsetHeight") / page.find("#to").size["height"]
        assert lines < {390: 10, 1024: 4, 1440: 2}[width], "the header leaves the window to the log"
        assert page.complaints == []
    finally:
        page.emulate(0, "")


def test_everything_is_drawn_light_and_dark(page):
    page.open(40)
    body = page.driver.find_element(By.TAG_NAME, "body")
    seen = set()
    for _ in range(2):
        seen.add(body.value_of_css_property("background-color"))
        for canvas in ("canvas.line", "canvas.lanes", "canvas.blocks"):
            assert page.colours(canvas) >= 4, f"{canvas} is empty"
        assert not page.barriers()
        page.press("t")
    assert len(seen) == 2
    rows = page.driver.find_elements(By.CSS_SELECTOR, ".log:first-child table.rows tbody tr")
    assert f"{len(rows)} running" in page.text(".facts")
    wide = page.driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, "the page is wider than its window"


def test_why_not_is_told_where_the_pointer_is(page, logs):
    walk = Walk(Index(open_log(logs[0])))
    step, number, why = next(found for found in waits(walk) if found[0] > 20)
    page.open(step)
    canvas = page.driver.find_element(By.CSS_SELECTOR, "canvas.lanes")
    width, height = canvas.size["width"], canvas.size["height"]
    first = max(walk.first_step, min(step - SPAN // 2, walk.last_step - SPAN + 1))
    right = LABEL + (step - first + 0.5) * (width - LABEL) / SPAN
    lane = [each["id"] for each in lanes(walk.moments(first, first + SPAN - 1), {})].index(number)
    place = int(right - width / 2), int((lane + 0.6) * LANE - height / 2)
    page.point(canvas, place, ".lane-hint", f"request {number}, ")
    assert why in page.text(".lane-hint")
    blocks = page.driver.find_element(By.CSS_SELECTOR, "canvas.blocks")
    page.point(blocks, (5 - blocks.size["width"] // 2, 0), ".block-hint", "block ")


def test_a_place_that_is_not_there_is_said(page, logs):
    """A link out of range shows the nearest step, and says that it is another one."""
    last = max(Walk(Index(open_log(log))).last_step for log in logs[: page.logs])
    page.driver.get("about:blank")
    page.driver.get(f"{page.address}#step={last + 5000}")
    page.reported("#error", f"step {last + 5000} is not in this log, which has steps 0 to {last}: step {last} is shown")
    assert page.text("#where") == f"step {last} of {last}"
    page.press(Keys.ARROW_LEFT)
    page.reported("#where", f"step {last - 1} of {last}")
    assert page.text("#error") == ""
    page.press("/", f"{last + 1}", Keys.ENTER)
    page.reported("#error", f"step {last + 1} is not in this log")
    for place, words in (
        ("#event=3", ""),
        ("#request=1", ""),
        ("#nonsense", '"nonsense" is no place'),
        ("#step=x", '"step x" is no place'),
    ):
        page.driver.get("about:blank")
        page.driver.get(page.address + place)
        page.reported("#where", " of ")
        page.reported("#error", words)
    assert page.complaints == []


def test_marked_steps_say_what_happened_in_them(page, logs):
    page.open(10)
    page.press("[")
    for _ in range(5):
        page.press(Keys.ARROW_RIGHT)
    page.at(15)
    page.press("]")
    overview = Overview(open_log(logs[0]), Walk(Index(open_log(logs[0]))).index.first)
    overview.make()
    tokens = overview.part(10, 15)["tokens"]
    page.reported(".part", "steps 10 to 15")
    assert f"6 steps {tokens} tokens computed" in re.sub(r"\s+", " ", page.text(".part"))
    page.driver.find_element(By.CSS_SELECTOR, ".part button").click()
    line = page.driver.find_element(By.CSS_SELECTOR, "canvas.line")
    ActionChains(page.driver, 1).move_to_element(line).click_and_hold().move_by_offset(60, 0).release().perform()
    page.reported(".part", "tokens computed")
    assert page.complaints == []


def slowly(events, state_digest, ranks):
    """A frame as it is, of an engine that waits before each."""
    time.sleep(0.005)
    return events, state_digest, ranks


def test_two_logs_stand_at_the_same_time(browser, tmp_path):
    config = small_config(page_count=15)
    make = partial(record, config=config, arrivals=60, timestamped=True)
    logs = [make(tmp_path / "run-3", seed=3), make(tmp_path / "run-4", seed=4, change=slowly)]
    starts = []
    for log in logs:
        overview = Overview(open_log(log), Walk(Index(open_log(log))).index.first)
        overview.make()
        at = np.array(overview.points(0, 10**6, 10**6)["at"])
        starts.append(at - at[0])
    wanted = np.searchsorted(starts[1], starts[0], side="right") - 1
    step = next(step for step in range(30, len(wanted)) if abs(wanted[step] - step) > 1)
    with shown(browser, *logs) as page:
        page.open(step)
        page.press("a")
        steps = "return [...document.querySelectorAll('.log')].map(each => Number(each.dataset.step))"
        WebDriverWait(browser, WAIT_S).until(lambda _: browser.execute_script(steps)[0] == step != browser.execute_script(steps)[1])
        assert abs(browser.execute_script(steps)[1] - wanted[step]) <= 1
        assert page.find("#align").get_attribute("aria-pressed") == "true"
        page.press("a")
        page.at(step)
        assert page.complaints == []


def test_only_what_is_wanted_is_shown_and_a_number_leads_to_a_life(page, logs):
    walk = Walk(Index(open_log(logs[0])))
    step = next(step for step in range(20, walk.last_step) if len(walk.moment(step).after.rows) > 2)
    number = int(walk.moment(step).after.rows.id[1])
    page.open(step)
    page.press("o", str(number), Keys.ENTER)
    rows = "return [...document.querySelector('table.rows tbody').rows].map(row => row.cells[0].querySelector('button')?.textContent)"
    WebDriverWait(page.driver, WAIT_S).until(lambda driver: driver.execute_script(rows) == [str(number)])
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    page.at(step)
    assert page.driver.execute_script(rows) == [str(number)], "the next steps show no others"
    page.driver.find_element(By.CSS_SELECTOR, "table.rows button").click()
    page.reported("#request-title", f"request {number}")
    assert "prompt tokens" in page.text("#request-facts")
    arrived = page.driver.find_element(By.CSS_SELECTOR, "#request-moments button")
    words = arrived.text
    arrived.click()
    place = int(re.findall(r"\d+", words)[0])
    page.at(place)
    assert not page.driver.execute_script("return document.querySelector('#request').open") and page.complaints == []


@pytest.mark.parametrize("scrubber", [2], indirect=True, ids=["two"])
def test_the_shorter_of_two_logs_says_that_it_has_ended(page, logs):
    ends = [Walk(Index(open_log(log))).last_step for log in logs]
    assert ends[0] != ends[1]
    page.driver.get("about:blank")
    page.driver.get(f"{page.address}#step={max(ends)}")
    page.reported("#where", f"step {max(ends)} of")
    shorter = f".log:nth-of-type({1 + ends.index(min(ends))}) .facts"
    page.reported(shorter, f"this log has no step {max(ends)}")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory) -> Path:
    """Forty requests at once."""
    config = small_config(page_count=600, max_num_seqs=45, max_num_batched_tokens=400, eos_token_ids=(), policy="fcfs")
    return record(tmp_path_factory.mktemp("crowd") / "log", config=config, seed=5, arrivals=400, size=10**6)


def test_words_under_the_pointer_are_in_the_window_however_many_lanes_there_are(browser, crowd):
    walk = Walk(Index(open_log(crowd)))
    step = max(range(walk.last_step), key=lambda each: len(walk.moment(each).after.rows))
    with shown(browser, crowd) as page:
        size = browser.get_window_size()
        browser.set_window_size(1100, 700)
        try:
            page.open(step)
            canvas = browser.find_element(By.CSS_SELECTOR, "canvas.lanes")
            lanes_here = round(canvas.size["height"] / LANE)
            assert lanes_here >= 38
            for lane in (0, lanes_here // 2, lanes_here - 2, lanes_here - 1):
                browser.execute_script(
                    "scrollTo(0, arguments[0].offsetTop + arguments[1] - innerHeight)", canvas, (lane + 1) * LANE + 20
                )
                left, top = browser.execute_script("const r = arguments[0].getBoundingClientRect(); return [r.left, r.top]", canvas)
                for across in range(LABEL + 5, canvas.size["width"] - 5, 25):
                    moving = ActionBuilder(browser)
                    moving.pointer_action.move_to_location(int(left) + across, int(top + (lane + 0.6) * LANE))
                    moving.perform()
                    if page.text(".lane-hint"):
                        break
                assert page.text(".lane-hint").startswith("request "), lane
                assert browser.execute_script(
                    "const r = document.querySelector('.lane-hint').getBoundingClientRect();"
                    "return r.top >= 0 && r.left >= 0 && r.bottom <= innerHeight && r.right <= innerWidth;"
                ), lane
        finally:
            browser.set_window_size(size["width"], size["height"])


def test_damage_is_on_the_page(browser, logs, tmp_path):
    shutil.copytree(logs[0], tmp_path / "log")
    path = max((tmp_path / "log").glob("*.vnextlog"))
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 4
    path.write_bytes(data)
    with shown(browser, tmp_path / "log", code=1) as page:
        page.open(0)
        page.reported(".progress", "ended: damaged at frame ")
        assert not page.barriers()


def waits(walk: Walk) -> Iterator[tuple[int, int, str]]:
    """(step, request, words) of all that wait for blocks."""
    for moment in walk.moments(walk.first_step, walk.last_step):
        for wait in explained(moment).waits:
            if wait.why == "blocks":
                yield moment.step, wait.id, f"too few free blocks: needs {wait.need}, {wait.have} free"


def test_preemptions_are_one_key_away(page):
    page.open(0)
    page.press("n")
    WebDriverWait(page.driver, WAIT_S).until(lambda _: "preempted in this step" in page.text(".facts"))


@pytest.mark.parametrize("scrubber", [2], indirect=True, ids=["two"])
def test_two_logs_stand_at_their_first_difference(page, logs):
    page.open(0)
    assert not page.driver.find_elements(By.CSS_SELECTOR, ".log.different")
    page.press("d")
    step = diff(*map(open_log, logs)).step
    assert step > 40
    page.at(step)
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # the event came behind the step's plan: states differ later
    page.at(step + 2)
    WebDriverWait(page.driver, WAIT_S).until(lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".log.different")) == 2)


# ---- a running engine --------------------------------------------------------------------------------------------


ANSWER = 60
SMALL = ("--threads", "1", "--max-num-seqs", "2", "--num-blocks-override", "12", "--max-model-len", "160")


@contextmanager
def followed(browser, server: Server) -> Iterator[Page]:
    command = [sys.executable, "-m", "vnext.replay", "ui", "--live", server.url, "--json"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield Page(browser, json.loads(shown.stdout.readline())["address"], 1)
    finally:
        shown.terminate()
        assert shown.wait(60) is not None


def asked_to_compute(server: Server, count: int) -> threading.Thread:
    bodies = [{"prompt": "import os", "max_tokens": ANSWER, "ignore_eos": True, "seed": seed} for seed in range(count)]
    thread = threading.Thread(target=complete_all, args=(server.url, bodies, count))
    thread.start()
    return thread


def test_a_running_engine_is_followed_until_it_ends(browser, tmp_path):
    """Steps come by themselves, a step back stays, the engine's end leaves everything that was seen."""
    with serving(tmp_path, "--show-log", *SMALL) as server, followed(browser, server) as page:
        assert f"vnext-replay ui --live {server.url}" in server.said
        page.driver.get(page.address)
        page.reported("#where", "no step yet")
        asked = asked_to_compute(server, 5)
        page.reported("#where", " of ")
        page.press(Keys.ARROW_LEFT)
        page.reported("#follow", "follow")
        stays = page.text("#where").split(" of ")[0]
        asked.join()
        page.reported("#live", "0 running, 0 waiting now")
        assert "running in this step" in page.text(".facts")
        shown, last = page.text("#where").split(" of ")
        assert shown == stays and int(last) > int(stays.split()[1])
        page.press("f")
        page.at(int(last))
        assert page.driver.current_url.endswith("#live")
        asked_to_compute(server, 1).join()
        page.at(int(last) + ANSWER)  # it went along
        assert server.stop() == 0
        page.reported("#more", "nobody answers at")
        page.press(Keys.HOME)
        page.at(0)
        assert page.complaints == []
        assert page.colours("canvas.line") >= 4
    assert replay(["verify", str(server.log_dir)]) == 0
