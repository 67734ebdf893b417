"""Images, sounds and videos on the page: where they lie in prompts, and which steps encoded them, found them or had their blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from core_drive import Engine, config_of, started_with
from log_drive import record
from test_ui import ask
from test_ui_browser import LABEL, LANE, SPAN, Page, shown

from vnext.replay.answers import seen_inputs
from vnext.replay.answers.request_life import life
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.replay.ui.app import lanes, page_files
from vnext.replay.ui.walk import Walk
from vnext.runtime.protocol.reasons import IMAGES, SOUNDS
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.sched.admission import Why
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, InputsFound, InputsSought
from vnext.state.state import State
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens, with_rows


class RecordedEngine(Engine):
    """Its events become frames of a log."""

    def __init__(self, log_dir: Path, privacy: str, environment: dict[str, str], **changes: object) -> None:
        super().__init__(**changes)
        started = msgspec.structs.replace(started_with(config_of(**changes)), environment=environment)
        self.recorder = Recorder.open(log_dir, started, privacy, Bounds(segment_bytes=10**6, max_bytes=0, timestamped=False))

    def fold(self, event: AnyEvent) -> State:
        before, after = self.state, super().fold(event)
        self.recorder.append([event], [before], digest(after), [])
        return after


def picture(number: int, step: int | None = None, rows: int = 2) -> list[int]:
    """Six tokens in `rows`, 0 for a sound's; `step`: so much later than the one before it."""
    return input_tokens(with_rows(bytes([number]) * DIGEST_SIZE, rows, step), 6).tolist()


def recorded(log_dir: Path, privacy: str = "full") -> Path:
    """Ranks encode units of images beside request 0, which decodes, and compute four tokens of them a step. 1 has an image whose
    vectors are in a file and a video of two parts; 2 asks the same again, 3 something that goes on otherwise within the video, and 4
    leaves before a step has reached its image."""
    engine = RecordedEngine(
        log_dir, privacy, {}, inputs_a_step=1, input_units=512, input_tokens=4, page_count=32, grids=True
    )
    engine.arrive([1, 2], max_tokens=40)
    engine.step()
    video = [*picture(2), *picture(3, 500)]
    engine.arrive([3, *picture(1), *video, *range(4, 9)], max_tokens=1)
    engine.fold(InputsSought(id=1))
    engine.step()
    engine.fold(InputsFound(id=1, places=(1,)))
    for prompt in ([3, *picture(1), *video, *range(4, 9)], [3, *picture(1), *picture(2), *picture(5), 4]):
        while len(engine.state.requests) > 1:
            engine.step()
        engine.arrive(prompt, max_tokens=1)
    while len(engine.state.requests) > 1:
        engine.step()
    engine.arrive([5, *picture(4, rows=0)], max_tokens=1)
    engine.abort(4)
    engine.run_out()
    engine.recorder.close()
    return log_dir


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory) -> Path:
    return recorded(tmp_path_factory.mktemp("inputs") / "log")


SEEN = {
    0: [],
    1: [
        ("image", "01010101", 1, 6, [(2, 2, "found"), (2, 3, "computed")]),
        ("video", "02020202", 7, 12, [(3, 5, "encoded"), (5, 6, "computed")]),
        ("video", "03030303", 13, 18, [(6, 8, "encoded"), (8, 9, "computed")]),
    ],
    2: [
        ("image", "01010101", 1, 6, [(10, 10, "hit")]),
        ("video", "02020202", 7, 12, [(10, 10, "hit")]),
        ("video", "03030303", 13, 18, [(10, 10, "hit")]),
    ],
    3: [
        ("image", "01010101", 1, 6, [(13, 13, "hit")]),
        ("image", "02020202", 7, 12, [(11, 13, "encoded"), (13, 13, "computed")]),  # the cache has 12 tokens
        ("image", "05050505", 13, 18, [(14, 16, "encoded"), (16, 17, "computed")]),
    ],
    4: [("sound", "04040404", 1, 6, [])],
}
"""By hand from the steps: (kind, digest, first token, last token, runs)."""


def test_a_life_tells_what_became_of_each_input(log_dir, capsys):
    index = Index(open_log(log_dir))
    for number, wanted in SEEN.items():
        found = life(index, number).inputs
        assert [(each.kind, each.digest, each.first, each.last, each.runs) for each in found] == wanted
    assert replay(["req", str(log_dir), "1"]) == 0
    assert "video 02020202, tokens 7 to 12: encoded in steps 3 to 5, computed in steps 5 to 6" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_lanes_have_the_same_inputs_as_lives_in_whatever_window(log_dir):
    walk = Walk(Index(open_log(log_dir)))
    whole = {lane["id"]: lane["inputs"] for lane in lanes(walk.moments(0, walk.last_step), {})}
    assert whole == {number: life(walk.indexed(), number).inputs for number in range(4)}
    for first in range(walk.last_step):
        for lane in lanes(walk.moments(first, first + 2), {}):
            wanted = [
                [(max(run[0], first), min(run[1], first + 2), run[2]) for run in each.runs if run[0] <= first + 2 and first <= run[1]]
                for each in whole[lane["id"]]
            ]
            assert [each.runs for each in lane["inputs"]] == wanted, first


def test_lanes_tell_of_waits_as_lives_do(log_dir):
    """Of a running request, too, whose input is not encoded yet, in a step that changes nothing else."""
    walk = Walk(Index(open_log(log_dir)))
    found = {
        (lane["id"], step): why["why"]
        for lane in lanes(walk.moments(0, walk.last_step), {})
        for first, last, kind, why in lane["runs"]
        if kind == "wait"
        for step in range(first, last + 1)
    }
    wanted = {
        (number, step): each.why
        for number in range(4)
        for each in life(walk.indexed(), number).waits
        for step in range(each.first_step, each.last_step + 1)
    }
    assert found == wanted and wanted[1, 4] == "inputs" and wanted[1, 1] == "disk"


def test_the_page_has_words_for_each_reason():
    text = page_files().files["paint.js"].body.decode()
    known = re.findall(r"^  (\w+): \(", text[text.index("const REASONS") :], re.MULTILINE)
    assert sorted(known) == sorted(get_args(Why))


def test_the_page_asks_for_both(log_dir):
    [(_, of_lanes), (_, of_life), (_, early)] = ask(
        log_dir, ["/api/lanes?first=0&last=89", "/api/request?id=1", "/api/request?id=4"]
    )
    [lane] = [each for each in json.loads(of_lanes)["lanes"] if each["id"] == 1]
    first = {"first": 1, "last": 6, "kind": "image", "digest": "01010101", "runs": [[2, 2, "found"], [2, 3, "computed"]]}
    assert lane["inputs"][0] == first
    found = json.loads(of_life)["inputs"]
    assert [(each["step"], each["last"]) for each in found] == [(2, 3), (3, 6), (6, 9)]
    assert found[0]["words"] == "image 01010101, tokens 1 to 6: found in files in step 2, computed in steps 2 to 3"
    [found] = json.loads(early)["inputs"]
    assert found["words"].endswith("no step has reached it") and found["step"] == found["last"] > 10


def test_a_sound_is_encoded_where_it_begins(tmp_path):
    """Without units, in chunks, of a model that listens: again by new ranks, again where the cache has a part, and not if found."""
    assert (seen_inputs.LISTENS, seen_inputs.FORM) == (SOUNDS, IMAGES)
    sounds = input_tokens(bytes(DIGEST_SIZE), 6).tobytes()
    forms = {IMAGES: f"{SOUNDS} 151646 480000"}, {IMAGES: "tiles 49190 64"}, {}
    assert [seen_inputs.inputs_of(sounds, config_of(), form)[0].kind for form in forms] == ["sound", "image", "image"]
    engine = RecordedEngine(tmp_path / "log", "full", {SOUNDS: "14 480000"}, max_num_batched_tokens=8)
    prompts = [[*input_tokens(bytes([number]) * DIGEST_SIZE, 14).tolist(), 5] for number in (7, 8)]
    engine.arrive(prompts[0], max_tokens=1)
    engine.step()
    engine.plan()
    engine.recover()
    engine.run_out()
    engine.arrive(prompts[0], max_tokens=1)
    engine.run_out()
    engine.arrive(prompts[1], max_tokens=1)
    engine.fold(InputsSought(id=2))
    engine.fold(InputsFound(id=2, places=(0,)))
    engine.run_out()
    engine.recorder.close()
    found = [each for number in range(3) for each in life(Index(open_log(tmp_path / "log")), number).inputs]
    assert [(each.kind, each.first, each.last) for each in found] == [("sound", 0, 13)] * 3
    assert [each.runs for each in found] == [
        [(0, 0, "encoded"), (1, 1, "computed"), (2, 2, "encoded"), (3, 3, "computed")],
        [(4, 4, "encoded")],
        [(5, 5, "found"), (5, 6, "computed")],
    ]


def test_a_log_without_texts_tells_the_same_of_other_digests(log_dir, tmp_path):
    """Where their tokens lie is not in it: a video is images."""
    for number in SEEN:
        shape, full = (life(Index(open_log(log)), number).inputs for log in (recorded(tmp_path / f"{number}", "shape"), log_dir))
        assert [(each.first, each.runs) for each in shape] == [(each.first, each.runs) for each in full]
        assert {each.kind for each in shape} <= {"image", "sound"} and not {each.digest for each in shape} & {each.digest for each in full}


# ---- in a browser ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(browser, log_dir) -> Iterator[Page]:
    with shown(browser, log_dir) as found:
        yield found


def point(page: Page, lane: int, step: int, words: str) -> str:
    """What the pointer tells of a lane's step, or of the lane itself (step -1)."""
    canvas = page.find("canvas.lanes")
    width, height = canvas.size["width"], canvas.size["height"]
    right = LABEL + (step + 0.5) * (width - LABEL) / SPAN if step >= 0 else LABEL / 2
    page.point(canvas, (int(right - width / 2), int((lane + 0.6) * LANE - height / 2)), ".lane-hint", words)
    return page.text(".lane-hint")


def test_lanes_show_where_inputs_lie_and_what_steps_do_with_them(page):
    page.open(1)
    page.reported("table.queue", "vectors of its images and sounds, are being read")
    page.open(5)
    assert page.text(".lane-legend") == "media: computed in the cache found in files encoded"
    hint = point(page, 1, 5, "request 1, steps 5 to 6: computes known tokens")
    assert hint.endswith("step 5: video 02020202 (tokens 7 to 12) encoded, video 02020202 (tokens 7 to 12) computed")
    assert "step 4: video 02020202 (tokens 7 to 12) encoded" in point(page, 1, 4, "request 1, steps 4 to 4: waits: as many")
    assert "step 10: image 01010101 (tokens 1 to 6) in the cache, " in point(page, 2, 10, "request 2, ")
    wanted = ", ".join(f"{kind} 0{place}0{place}0{place}0{place} (tokens {first} to {first + 5})"
                       for kind, place, first in (("image", 1, 1), ("video", 2, 7), ("video", 3, 13)))  # fmt: skip
    assert point(page, 1, -1, "request 1: ") == f"request 1: {wanted}"
    assert page.complaints == []


def test_a_life_leads_to_the_steps_of_its_inputs(page):
    page.open(2)
    page.driver.execute_script("document.querySelectorAll('table.rows button')[1].click()")
    page.reported("#request-inputs", "video 02020202, tokens 7 to 12: encoded in steps 3 to 5, computed in steps 5 to 6")
    line = page.driver.find_elements("css selector", "#request-inputs button")[2]
    assert line.text == "steps 6 to 9"
    line.click()
    page.at(6)
    page.driver.execute_script("document.querySelector('table.rows button').click()")
    page.reported("#request-title", "request 0")
    assert not page.find("#request-inputs-title").is_displayed() and page.complaints == []
    page.driver.execute_script("document.querySelector('#request').close()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_inputs_are_drawn_in_the_colours_of_the_legend(page, width, scheme):
    page.emulate(width, scheme)
    try:
        page.open(10)
        assert page.driver.execute_script("return document.documentElement.dataset.theme") == scheme
        assert page.find(".lane-legend").is_displayed()
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
        boxes = [each.value_of_css_property("background-color") for each in page.driver.find_elements("css selector", ".lane-legend i")]
        assert len(set(boxes)) == 4
        assert pixels(page, [(1, 9), (2, 10), (1, 2), (1, 3)]) == boxes
        assert not page.barriers()
        assert [each for each in page.complaints if "readback" not in each["message"]] == []
    finally:
        page.emulate(0, "")


def pixels(page: Page, cells: list[tuple[int, int]]) -> list[str]:
    """The colours near the lower edges of (lane, step), as CSS has them."""
    return page.driver.execute_script(
        "const canvas = document.querySelector('canvas.lanes'), ratio = canvas.width / canvas.clientWidth;"
        "return arguments[0].map(([lane, step]) => {"
        f"  const x = ({LABEL} + (step + 0.5) * (canvas.clientWidth - {LABEL}) / {SPAN}) * ratio, y = (lane * {LANE} + 14) * ratio;"
        "  const [r, g, b, a] = canvas.getContext('2d').getImageData(x, y, 1, 1).data;"
        "  return `rgba(${r}, ${g}, ${b}, ${a / 255})`; });", cells,
    )  # fmt: skip


def test_lanes_of_texts_have_no_legend(browser, tmp_path):
    with shown(browser, record(tmp_path / "log", arrivals=10)) as page:
        page.open(5)
        assert not page.find(".lane-legend").is_displayed() and page.complaints == []
