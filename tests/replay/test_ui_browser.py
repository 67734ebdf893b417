"""The scrubber in a real browser: keys, buttons, addresses, hover, two logs, light and dark, and nothing in its console."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_drive import record, small_config

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

ROOT = Path(__file__).parents[2]
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1400,1800")
WAIT_S = 30

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
    """Two runs of one engine that part in their first arrivals."""
    folder = tmp_path_factory.mktemp("browser")
    config = small_config(block_count=14)
    return [record(folder / f"run-{seed}", config=config, seed=seed, arrivals=60, size=4000) for seed in (3, 4)]


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
        WebDriverWait(self.driver, WAIT_S).until(lambda driver: driver.execute_script(shown))
        assert self.text("#where").startswith(f"step {step} of")

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

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


def test_why_not_is_told_where_the_pointer_is(page):
    page.open(40)
    canvas = page.driver.find_element(By.CSS_SELECTOR, "canvas.lanes")
    told = set()
    pointer = ActionChains(page.driver, 1)
    for line in range(canvas.size["height"] // 15):
        for part in (-0.2, 0.0, 0.2):
            y = int(line * 15 + 8 - canvas.size["height"] / 2)
            pointer.move_to_element_with_offset(canvas, int(part * canvas.size["width"]), y).perform()
            told.add(page.text(".lane-hint").partition(": ")[2].partition(":")[0])
            if {"a token a step", "waits"} <= told:
                break
    assert {"a token a step", "waits"} <= told
    blocks = page.driver.find_element(By.CSS_SELECTOR, "canvas.blocks")
    ActionChains(page.driver).move_to_element_with_offset(blocks, 5 - blocks.size["width"] // 2, 0).perform()
    assert page.text(".block-hint").startswith("block ")


def test_preemptions_are_one_key_away(page):
    page.open(0)
    page.press("n")
    WebDriverWait(page.driver, WAIT_S).until(lambda _: "gave way in this step" in page.text(".facts"))
