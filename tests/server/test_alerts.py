"""Alert rules and dashboard: they ask for metrics and labels that a server shows, and each alert fires on what it is for alone.

promtool (Debian's package `prometheus`) runs the rules over planted series.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from edge_server import EdgeServer
from fake_engine import wait_until
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from vnext.options.table import every_option
from vnext.replay.cli.main import MODULES
from vnext.server.routes import ROUTES

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from router_here import RouterHere  # noqa: E402  (needs the path above)

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]  # fmt: skip
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
OF_PROMETHEUS = {"instance", "job"}
"""The labels that Prometheus itself gives to each series."""


@pytest.fixture(scope="module")
def families() -> list[Metric]:
    """What a server shows that has answered a request and closed a connection; and what a router does."""
    with EdgeServer(head_timeout_s=0.1) as server:
        shown = "vnext_num_preemptions_total", "vnext_connections_closed_total{"
        texts = [""]

        def is_shown() -> bool:
            with suppress(OSError):  # a request that came late: its connection is closed too
                texts.append(server.get("/metrics")[1])
            return all(each in texts[-1] for each in shown)

        def is_answered() -> bool:
            with suppress(OSError):
                return server.post("/v1/completions", {"prompt": "say:a"})[0] == 200
            return False

        wait_until(is_answered)
        with socket.create_connection(("127.0.0.1", server.port)):
            wait_until(is_shown)
    with RouterHere("http://127.0.0.1:9", ready=0) as router:
        texts.append(router.call("GET", "/metrics")[1])
    return [family for text in texts[-2:] for family in text_string_to_metric_families(text)]


@pytest.fixture(scope="module")
def labels(families: list[Metric]) -> dict[str, set[str]]:
    """Metric -> the labels of its samples."""
    found: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_names_of_metrics_say_what_they_are(families: list[Metric]) -> None:
    """As Prometheus has it: a counter ends with _total, and nothing else does. The parser takes the ending away."""
    kinds = {family.name: family.type for family in families}
    counted = {sample.name for family in families if family.type == "counter" for sample in family.samples}
    assert counted and all(name.endswith("_total") for name in counted)
    endings = ("_total", "_sum", "_count", "_bucket", "_created")
    assert not [name for name, kind in kinds.items() if kind == "gauge" and name.endswith(endings)]
    assert kinds["vnext_blocks"] == "gauge"


class Asked(NamedTuple):
    """A metric and the labels by which an expression takes it apart."""

    metric: str
    labels: frozenset[str]


def asked(expression: str) -> Iterator[Asked]:
    """Every metric of an expression with the labels of its selector and of the `by (...)` that it stands under."""
    spans = [
        (found.start(), closing(expression, found.end()), set(re.findall(r"\w+", found[1])))
        for found in re.finditer(r"\bby \(([^)]*)\) \(", expression)
    ]
    for found in re.finditer(r"\b(vnext_\w+)(?:{([^}]*)})?", expression):
        own = set(re.findall(r"(\w+)\s*[=!]~?\s*\"", found[2] or ""))
        above = set().union(*(labels for start, end, labels in spans if start < found.start() < end))
        yield Asked(found[1], frozenset((own | above) - OF_PROMETHEUS))


def closing(text: str, place: int) -> int:
    """Where the bracket closes that is open at `place`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        place += 1
    return place


def wrong(expression: str, labels: dict[str, set[str]]) -> list[str]:
    """What an expression asks for and a server does not show."""
    found = list(asked(expression))
    assert found, expression
    return [f"{each.metric}: {sorted(each.labels - labels.get(each.metric, set()))}" for each in found
            if each.metric not in labels or not each.labels <= labels[each.metric]]  # fmt: skip


def test_an_expression_that_asks_for_what_there_is_not_is_found(labels: dict[str, set[str]]) -> None:
    assert wrong('sum by (status) (rate(vnext_http_requests_total{status="500"}[5m]))', labels) == []
    assert wrong('sum by (code) (rate(vnext_http_requests_total{status="500"}[5m]))', labels) == ["vnext_http_requests_total: ['code']"]
    assert wrong('vnext_http_requests_total{code=~"5.."}', labels) == ["vnext_http_requests_total: ['code']"]
    assert wrong("vnext_http_requests", labels) == ["vnext_http_requests: []"]
    two = "sum by (status) (vnext_http_requests_total) / sum by (le) (vnext_http_requests_total)"
    assert wrong(two, labels) == ["vnext_http_requests_total: ['le']"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule: dict[str, Any], labels: dict[str, set[str]]) -> None:
    assert wrong(rule["expr"], labels) == []
    assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"]["severity"] in ("page", "ticket")
    text = " ".join(rule["annotations"].values())
    assert text.count(".") >= 2 and {*re.findall(r"(?<!\S)--[a-z-]+", text)} <= {flag for each in every_option() for flag in each.flags}
    paths = {(each.method, each.plain_path) for each in ROUTES}
    assert {*re.findall(r"\b(GET|POST) (/\w+)", text)} <= paths
    assert {*re.findall(r"vnext-replay (\w+)", text)} <= {name for names in MODULES.values() for name in names}


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(labels: dict[str, set[str]]) -> None:
    panels, variables = BOARD["panels"], {each["name"] for each in BOARD["templating"]["list"]}
    for target in (target for panel in panels for target in panel["targets"]):
        assert wrong(target["expr"], labels) == []
        assert set(re.findall(r"\$([a-z]\w*)", target["expr"])) <= variables
        assert {*re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))} <= {
            label for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in re.findall(r"\w+", found)
        }
    for each in BOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", each["query"]).groups()
        assert label in labels[metric] | OF_PROMETHEUS
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    drawn = {each.metric for panel in panels for target in panel["targets"] for each in asked(target["expr"])}
    assert {each.metric for rule in RULES for each in asked(rule["expr"])} <= drawn, "what wakes a person is on the dashboard"
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


# ---- planted series ----------------------------------------------------------------------------------------------
# A sample a minute: six hours of a healthy server, then what is planted, and a look twenty minutes later.

HEALTHY_MIN, PLANTED_MIN = 400, 20
HEALTHY = {
    "vnext_engine_up": (1, 0), "vnext_engine_stalled": (0, 0), "vnext_recoveries_total": (1, 0), "vnext_log_frames_lost_total": (0, 0),
    "vnext_num_requests_waiting": (2, 0), "vnext_steps_total": (0, 3000), "vnext_num_preemptions_total": (0, 6),
    "vnext_requests_spoilt_total": (1, 0), "vnext_memory_shortages_total": (2, 0), "vnext_prefix_cache_queries_total": (0, 60_000),
    "vnext_prefix_cache_hits_total": (0, 30_000), 'vnext_http_requests_total{status="200"}': (0, 600),
    'vnext_http_requests_total{status="429"}': (0, 6),
    "vnext_router_backend_up": (1, 0), "vnext_router_streams_lost_total": (3, 0),
    **{f'vnext_time_to_first_token_seconds_bucket{{le="{bound}"}}': (0, 600) for bound in ("10", "30", "+Inf")},
}  # fmt: skip
"""Series -> its first value and its growth a minute."""
PLANTED = {
    "VnextDown": ("vnext_engine_up", 0, 0),
    "VnextStalled": ("vnext_engine_stalled", 1, 0),
    "VnextIdleWhileRequestsWait": ("vnext_steps_total", 0, 0),
    "VnextRecovers": ("vnext_recoveries_total", 2, 1),
    "VnextFaults": ('vnext_http_requests_total{status="500"}', 1, 0),
    "VnextSpoilsAnswers": ("vnext_requests_spoilt_total", 2, 1),
    "VnextLacksMemory": ("vnext_memory_shortages_total", 3, 1),
    "VnextLogIncomplete": ("vnext_log_frames_lost_total", 5, 5),
    "VnextQueueGrows": ("vnext_num_requests_waiting", 3, 4),
    "VnextRefuses": ('vnext_http_requests_total{status="429"}', 2500, 100),
    "VnextSlowFirstToken": ('vnext_time_to_first_token_seconds_bucket{le="10"}', 240_600, 500),
    "VnextPreempts": ("vnext_num_preemptions_total", 2600, 120),
    "VnextCacheHitsCollapse": ("vnext_prefix_cache_hits_total", 12_003_000, 3_000),
    "VnextRouterLacksServer": ("vnext_router_backend_up", 0, 0),
    "VnextRouterLosesStreams": ("vnext_router_streams_lost_total", 4, 1),
}
"""Alert -> what makes it fire: the series, which is new where a healthy server has none, its value from then on, and its growth a
minute."""


def series(planted: dict[str, tuple[int, int]]) -> list[dict[str, str]]:
    """promtool's form; a series without a planted end goes on as it began."""
    found = []
    for name in {**HEALTHY, **planted}:
        metric, _, own = name.partition("{")
        labels = ",".join(filter(None, [own.rstrip("}"), 'model_name="m",engine="0",instance="a:8000",job="vnext"']))
        first, growth = HEALTHY.get(name, (0, 0))
        then, after = planted.get(name, (first + growth * (HEALTHY_MIN + 1), growth))
        before = f"{first}{growth:+}x{HEALTHY_MIN}" if name in HEALTHY else f"_x{HEALTHY_MIN}"
        values = f"{before} {then}{after:+}x{PLANTED_MIN}"
        found.append({"series": f"{metric}{{{labels}}}", "values": values})
    return found


def case(fires: str, planted: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """A test for promtool: this alert fires and no other; "" for none."""
    every = {"model_name": "m", "engine": "0", "instance": "a:8000", "job": "vnext"}
    looks = []
    for rule in RULES:
        grouped = re.search(r"by \(([^)]*)\)", rule["expr"])
        kept = re.findall(r"\w+", grouped[1]) if grouped else [*every]
        alert = {"exp_labels": {name: every[name] for name in kept if name in every} | rule["labels"], "exp_annotations": rule["annotations"]}
        looks.append({"eval_time": f"{HEALTHY_MIN + PLANTED_MIN}m", "alertname": rule["alert"],
                      "exp_alerts": [alert] if rule["alert"] == fires else []})  # fmt: skip
    return {"name": fires, "interval": "1m", "input_series": series(planted), "alert_rule_test": looks}


def test_every_alert_has_its_series() -> None:
    assert [*PLANTED] == [rule["alert"] for rule in RULES]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: it comes with Debian's package prometheus")
def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    ran = subprocess.run(["promtool", "check", "rules", "alerts.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and f"{len(RULES)} rules found" in ran.stdout, ran.stdout + ran.stderr
    planted = [case(alert, {name: (then, after)}) for alert, (name, then, after) in PLANTED.items()]
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": "2m", "tests": [case("", {}), *planted]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    ran = subprocess.run(["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
