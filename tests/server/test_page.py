"""The page at / in a real browser: talk, stop, change, call a tool, keep to a schema, see probabilities, a cut, a key, the engine, the API."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from chromium import BrowserPage
from edge_server import EdgeServer
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import AbortRequests, SubmitRequest
from vnext.server.routes import ROUTES

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
from selenium.webdriver.common.keys import Keys  # noqa: E402

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
LAST = "#messages article:last-child"


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as running:
        yield running


class ChatPage(BrowserPage):
    """The page, newly opened."""

    def __init__(self, driver, url: str) -> None:
        super().__init__(driver)
        driver.get(url)
        driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        driver.get("about:blank")
        driver.get(url)
        self.reported("#model", "toy")

    def fill(self, selector: str, words: str) -> None:
        self.driver.execute_script("arguments[0].value = arguments[1]", self.find(selector), words)

    def say(self, words: str) -> None:
        self.fill("#text", words)
        self.find("#text").send_keys(Keys.ENTER)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    @property
    def shown(self) -> list[str]:
        """In one look, since the page draws articles anew while an answer comes."""
        look = "return [...document.querySelectorAll('#messages article')].map(each => each.innerText.trim())"
        found: list[str] = self.driver.execute_script(look)
        return found


@pytest.fixture
def page(browser, server) -> ChatPage:
    return ChatPage(browser, server.url)


def test_a_talk_is_streamed_changed_and_regenerated(page, server):
    page.say("say:one **two** <b>three</b> `four`")
    page.reported(LAST, "one two <b>three</b> four")
    assert [each.tag_name for each in page.driver.find_elements("css selector", f"{LAST} p *")] == ["strong", "code"], "no markup of a model acts"
    page.reported(f"{LAST} .note", "tokens in (")
    page.say("say:five")
    page.reported(LAST, "five")
    page.click("#again")
    page.reported(LAST, "five")
    page.click("#messages article:first-child button")
    page.find("#messages textarea").send_keys(" and more")
    page.click("#messages article:first-child button")
    page.reported(LAST, "four and more")
    assert len(page.shown) == 2, "what followed the changed message is gone"
    page.driver.refresh()
    page.reported(LAST, "four and more")
    page.click("#new")
    assert not page.shown and page.complaints == []


ANSWER = """## Rivers
Of *Europe*, the **longest**:
1. Volga
2. Danube

| river | km |
|---|---|
| Volga | 3,530 |

3. Ural
2 * 3 * 4
of them
```python
print(1 * 2 * 3)
```"""


def test_an_answer_is_set_as_its_marks_say(page):
    page.say(f"say:{ANSWER}")
    page.reported(f"{LAST} .note", "tokens in (")
    look = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)"
    found = {name: page.driver.execute_script(look, f"{LAST} {name}") for name in ("h4", "em", "strong", "li", "th", "td", "pre code", "p")}
    assert found.pop("p")[:2] == ["Of Europe, the longest:", "2 * 3 * 4\nof them"]
    assert found == {
        "h4": ["Rivers"], "em": ["Europe"], "strong": ["longest"], "li": ["Volga", "Danube", "Ural"], "th": ["river", "km"],
        "td": ["Volga", "3,530"], "pre code": ["print(1 * 2 * 3)\n"],
    }  # fmt: skip
    assert page.driver.execute_script("return [...document.querySelectorAll('ol')].map(each => each.start)") == [1, 3]


DROP = """
window.bodies = [];
const real = window.fetch;
window.fetch = (path, options) => { if (options?.body) bodies.push(options.body); return real(path, options); };
const bytes = Uint8Array.from(atob(arguments[0]), (each) => each.charCodeAt(0)), carried = new DataTransfer();
carried.items.add(new File([bytes], "red.png", { type: "image/png" }));
carried.items.add(new File(["a"], "a.txt", { type: "text/plain" }));
document.getElementById("composer").dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
"""
RED = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def test_an_image_that_is_dropped_goes_with_the_message(page):
    page.driver.execute_script(DROP, RED)
    page.reported("#images", "Leave it out")
    assert len(page.driver.find_elements("css selector", "#images img")) == 1, "a text is no image"
    page.say("What is it?")
    page.reported("#error", "messages[0].content[0]")
    [body] = map(json.loads, page.driver.execute_script("return window.bodies"))
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}
    assert body["messages"] == [{"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}]
    assert page.find("#messages article.user img").get_property("naturalWidth") == 1 and page.find("#images").text == ""


def test_an_answer_can_be_stopped(page, server):
    server.engine.running.clear()
    page.fill("#max_tokens", "50")
    page.say("go on")
    page.click("#stop")
    server.engine.wait_for(lambda: server.engine.of_kind(AbortRequests))
    server.engine.running.set()
    page.say("say:again")
    page.reported(LAST, "again")


def test_settings_reach_the_engine_and_a_wrong_box_has_a_sentence(page, server):
    for name, value in (("temperature", "0.5"), ("top_p", "0.25"), ("max_tokens", "7"), ("seed", "11"), ("system", "Be kind.")):
        page.fill(f"#{name}", value)
    page.say("no order")
    page.reported(LAST, "xxxxxxx")
    asked = server.engine.of_kind(SubmitRequest)[-1].sampling
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.seed) == (0.5, 0.25, 7, 11)
    page.fill("#schema", "{wrong")
    page.say("say:never")
    page.reported("#error", "Schema of the answer: this is no JSON")
    page.fill("#schema", json.dumps({"type": "rain"}))
    page.click("#again")
    page.reported("#error", "rain")


def test_a_tool_is_called_and_its_result_goes_back(page, server):
    page.fill("#tools", json.dumps([WEATHER]))
    page.say(f"say:{CALL}")
    page.reported(f"{LAST} .call", 'weather({"city": "Bonn"})')
    page.find(f"{LAST} .call input").send_keys("say:sun")
    page.click(f"{LAST} .call button")
    page.reported(LAST, "sun")
    assert "Result of the tool" in page.shown[-2]


def test_each_token_tells_its_probability(page):
    page.click("#probabilities")
    page.say("say:ab")
    page.reported(f"{LAST} .tokens", "ab")
    assert "%" in page.find(f"{LAST} .tokens span").get_attribute("title")


def test_an_answer_survives_a_cut_connection(page, server):
    server.engine.running.clear()
    page.driver.execute_script(
        "const real = window.fetch; window.asked = [];"
        "window.fetch = async (path, options) => {"
        "  const answer = await real(path, options);"
        "  if (!String(path).endsWith('completions')) return answer;"
        "  window.asked.push(options.headers['Last-Event-ID'] || '');"
        "  if (window.asked.length > 1) return answer;"
        "  const read = new TextDecoder(), write = new TextEncoder(); let left = 3, rest = '';"
        "  const cut = new TransformStream({async transform(part, to) {"  # events, of which a part may have any number
        "    const events = (rest + read.decode(part)).split('\\n\\n'); rest = events.pop();"
        "    for (const each of events) if (left-- > 0) to.enqueue(write.encode(each + '\\n\\n'));"
        "    if (left >= 0) return;"
        "    await new Promise(read => setTimeout(read, 200));"  # what is queued would be lost with the error
        "    to.error(new TypeError('cut'));"
        "  }});"
        "  return new Response(answer.body.pipeThrough(cut), {status: answer.status});"
        "};"
    )
    page.say("say:one two three four five six seven eight")
    server.engine.running.set()
    page.reported(LAST, "one two three four five six seven eight")
    page.reported(f"{LAST} .note", "tokens in")
    first, *others = page.driver.execute_script("return window.asked")
    assert first == "" and others and all(others)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_anybody_from_the_page(page, server, width, scheme):
    page.emulate(width, scheme)
    try:
        theme = "return document.documentElement.dataset.theme"
        page.reported(f"html[data-theme={scheme}]", "")  # as the system has it now, with the next frame
        assert not page.barriers()
        page.say("say:one **two** `four`")
        page.reported(LAST, "four")
        page.driver.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert not page.barriers()
        page.driver.get(f"{server.url}/docs")
        page.reported("body", "/v1/chat/completions")
        assert page.driver.execute_script(theme) == scheme and not page.barriers()
        page.driver.execute_script("document.body.append(document.createElement('img'))")
        assert page.barriers()[0].startswith("Images must have alternate text"), "a planted one is seen"
    finally:
        page.emulate(0, "")


def test_a_talk_that_a_browser_does_not_keep_goes_on(page):
    page.driver.execute_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    page.say("say:long")
    page.reported(f"{LAST} .note", "tokens in")
    page.say("say:longer")
    page.reported(LAST, "longer")
    assert len(page.shown) == 4 and page.complaints == []


def test_a_key_is_asked_for_and_kept_for_the_tab(browser):
    with EdgeServer(byte_level(TEMPLATE), api_keys=("secret",)) as closed:
        page = BrowserPage(browser)
        browser.get(closed.url)
        page.reported("#error", "The API key is missing or wrong")
        page.find("#key").send_keys("secret", Keys.ENTER)
        page.reported("#model", "toy")
        browser.refresh()
        page.reported("#model", "toy")
        browser.execute_script("sessionStorage.clear()")


def test_the_engine_is_shown_as_it_runs(page, server):
    page.say("say:something")
    page.reported(LAST, "something")
    page.click("#to-engine")
    page.reported("#parts", "Key-value blocks")
    assert len(page.driver.find_elements("css selector", "#parts section")) == 9
    page.reported("#times", "mean ")
    assert page.text("#replay") == f"vnext-replay ui --live {server.url}" and page.complaints == []


def test_the_api_is_listed_and_tried(page, server):
    page.driver.get(f"{server.url}/docs")
    page.reported("#model", "toy")
    page.reported("#statuses", "a field is wrong")
    routes = page.driver.find_elements("css selector", ".route")
    assert len(routes) == len(ROUTES)
    chat = next(each for each in routes if "/v1/chat/completions" in each.text)
    chat.click()
    page.reported(".route[open] table", "max_completion_tokens integer")
    page.reported(".route[open] table", "the most tokens of the answer")
    page.reported(".route[open]", "list of ChatMessage required")
    page.reported(".route[open] caption", "ChatMessage")
    body = chat.find_element("css selector", "textarea")
    assert json.loads(body.get_attribute("value"))["model"] == "toy"
    chat.find_element("css selector", "button").click()
    page.reported(".route[open] .try pre", '"object": "chat.completion"')
    page.driver.execute_script("arguments[0].value = arguments[1]", body, '{"messages": []}')
    chat.find_element("css selector", "button").click()
    page.reported(".route[open] .try pre", "400 Bad Request")
    page.driver.execute_script("arguments[0].click()", chat.find_element("css selector", "summary"))
    models = next(each for each in routes if "/v1/models/{model}" in each.text)
    models.click()
    page.reported(".route[open] .try label", "model")  # its inside comes behind the click
    models.find_element("css selector", "input").send_keys("toy")
    models.find_element("css selector", "button").click()
    page.reported(".route[open] .try pre", '"id": "toy"')
    sound = next(each for each in routes if "/v1/audio/transcriptions" in each.text)
    page.driver.execute_script("arguments[0].firstChild.click()", sound)
    page.reported(".route[open] .try label", "File")
    assert sound.find_element("css selector", "input").get_attribute("type") == "file"


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", ["chat", "engine", "api"])
def test_the_page_fits_its_window(page, width, view):
    try:
        page.driver.set_window_size(width, 844)
        page.click(f"#to-{view}")
        page.reported("header", "vnext")
        assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        composer = page.driver.execute_script("return document.getElementById('composer').getBoundingClientRect().bottom")
        assert view != "chat" or composer <= page.driver.execute_script("return innerHeight")
    finally:
        page.driver.set_window_size(1400, 1800)
