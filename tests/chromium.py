"""A real browser for the tests of pages, and what every page can be asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1400,1800")
WAIT_S = 60


def start_browser() -> Any:
    """A new one; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
    if not (BROWSER and DRIVER):
        pytest.skip("no browser: install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


class BrowserPage:
    """A page as a person has it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        driver.get_log("browser")  # what earlier tests left in it

    def emulate(self, width: int, scheme: str) -> None:
        """Take a screen of this width (0: the window) and a colour scheme ("": the browser's)."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        if width:
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def reported(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        def has_words(driver: Any) -> bool:
            return any(words in each.text for each in driver.find_elements("css selector", selector))

        try:
            WebDriverWait(self.driver, WAIT_S, ignored_exceptions=_redrawn()).until(has_words)
        except TimeoutException:
            raise AssertionError(f"{selector} says {self.text(selector)!r}, not {words!r}") from None

    def barriers(self) -> list[str]:
        """What keeps people who see, hear or point otherwise from the page, by axe-core's rules: each with an element that has it."""
        axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed (pip install -e .[dev])")
        self.driver.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text())
        look = "const done = arguments[arguments.length - 1]; axe.run(document).then(found => done(found.violations), done)"
        found = self.driver.execute_async_script(look)
        return [f"{each['help']}: {each['nodes'][0]['html'][:200]}" for each in found]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What the browser's console says since the last time."""
        return self.driver.get_log("browser")


def _redrawn() -> tuple[type[Exception], ...]:
    from selenium.common.exceptions import StaleElementReferenceException

    return (StaleElementReferenceException,)
