"""The scrubber in a real browser: keys, buttons, addresses, hover, two logs, light and dark, and nothing in its console."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from log_drive import record, small_config

from vnext.replay.cli import main as replay
from vnext.replay.diff import diff
from vnext.replay.index import Index
from vnext.replay.source import open_log
from vnext.replay.ui.lanes import lanes
from vnext.replay.ui.step import explained
from vnext.replay.ui.walk import Walk

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "e2e"))

from serving import Server, complete_all, serving  # noqa: E402  (needs the path above)

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1400,1800")
WAIT_S = 30
SPAN, LABEL, LANE = 90, 58, 15  # lanes.js: steps in view, pixels before the first one, pixels of a lane

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: install Debian's chromium and chromium-driver"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[Path]:
    """Two runs of one engine: the second one's clients go on when the first one's have stopped."""
    folder = tmp_path_factory.mktemp("browser")
    config = small_config(block_count=15)
    return [record(folder / f"run-{count}", config=config, seed=3, arrivals=count, size=4000) for count in (60, 70)]


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def page(request, browser, logs) -> Iterator[Page]:
    command = [sys.executable, "-m", "vnext.replay", "ui", *map(str, logs[: request.param]), "--json"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield Page(browser, json.loads(served.stdout.readline())["address"], request.param)
    finally:
        served.terminate()
        served.wait(20)


class Page:
    """The page as a person has it."""

    def __init__(self, driver, address: str, logs: int) -> None:
        self.driver, self.address, self.logs = driver, address, logs

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

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def told(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        try:
            WebDriverWait(self.driver, WAIT_S).until(lambda _: words in self.text(selector))
        except TimeoutException:
            raise AssertionError(f"{selector} says {self.text(selector)!r}, not {words!r}") from None

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

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
    assert page.driver.get_log("browser") == []


def test_everything_is_drawn_light_and_dark(page):
    page.open(40)
    body = page.driver.find_element(By.TAG_NAME, "body")
    seen = set()
    for _ in range(2):
        seen.add(body.value_of_css_property("background-color"))
        for canvas in ("canvas.line", "canvas.lanes", "canvas.blocks"):
            assert page.colours(canvas) >= 4, f"{canvas} is empty"
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
    lane = [each["id"] for each in lanes(walk.moments(first, first + SPAN - 1))].index(number)
    pointer = ActionChains(page.driver, 1)
    pointer.move_to_element_with_offset(canvas, int(right - width / 2), int((lane + 0.6) * LANE - height / 2)).perform()
    assert page.text(".lane-hint").startswith(f"request {number}, ") and why in page.text(".lane-hint")
    blocks = page.driver.find_element(By.CSS_SELECTOR, "canvas.blocks")
    pointer.move_to_element_with_offset(blocks, 5 - blocks.size["width"] // 2, 0).perform()
    assert page.text(".block-hint").startswith("block ")


def waits(walk: Walk) -> Iterator[tuple[int, int, str]]:
    """(step, request, words) of all that wait for blocks."""
    for moment in walk.moments(walk.first_step, walk.last_step):
        for wait in explained(moment).waits:
            if wait.why == "blocks":
                yield moment.step, wait.id, f"too few free blocks: needs {wait.need}, {wait.have} free"


def test_preemptions_are_one_key_away(page):
    page.open(0)
    page.press("n")
    WebDriverWait(page.driver, WAIT_S).until(lambda _: "gave way in this step" in page.text(".facts"))


@pytest.mark.parametrize("page", [2], indirect=True, ids=["two"])
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
        assert shown.wait(20) is not None


def asked_to_compute(server: Server, count: int) -> threading.Thread:
    bodies = [{"prompt": "import os", "max_tokens": ANSWER, "ignore_eos": True, "seed": seed} for seed in range(count)]
    thread = threading.Thread(target=complete_all, args=(server.url, bodies, count))
    thread.start()
    return thread


def test_a_running_engine_is_followed_until_it_ends(browser, tmp_path):
    """Steps come by themselves, a step back stays, the engine's end leaves everything that was seen."""
    with serving(tmp_path, "--show-log", *SMALL) as server, followed(browser, server) as page:
        assert f"vnext-replay ui --live {server.url}" in server.said
        page.driver.get_log("browser")  # what earlier tests left in it
        page.driver.get(page.address)
        page.told("#where", "no step yet")
        asked = asked_to_compute(server, 5)
        page.told("#where", " of ")
        page.press(Keys.ARROW_LEFT)
        page.told("#follow", "follow")
        stays = page.text("#where").split(" of ")[0]
        asked.join()
        page.told("#live", "0 running, 0 waiting now")
        shown, last = page.text("#where").split(" of ")
        assert shown == stays and int(last) > int(stays.split()[1])
        page.press("f")
        page.at(int(last))
        assert page.driver.current_url.endswith("#live")
        asked_to_compute(server, 1).join()
        page.at(int(last) + ANSWER)  # it went along
        assert server.stop() == 0
        page.told("#more", "nobody answers at")
        page.press(Keys.HOME)
        page.at(0)
        assert page.driver.get_log("browser") == []
        assert page.colours("canvas.line") >= 4
    assert replay(["verify", str(server.log_dir)]) == 0
