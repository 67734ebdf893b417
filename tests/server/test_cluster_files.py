"""Compose file, Prometheus' configuration and Helm chart: they are well-formed, and every flag, path, user and volume is ours.

Helm's own code renders and lints the chart, without a cluster; kubernetes-validate has the schemas of what comes out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vnext.commands.api_servers import GRACE_S
from vnext.gateway.run import OPEN
from vnext.options.parser import unknown_variables
from vnext.options.reader import Command, RouterCommand, ServeCommand, parse
from vnext.options.table import every_option
from vnext.server.routes import ROUTES
from vnext.server.settings import ServerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
CHART = DEPLOY / "chart"
KUBERNETES = "1.31"
FILE = dict(
    line.split(" ", 1) for line in re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text()).splitlines() if line[:1].isalpha()
)  # fmt: skip
"""The container file's last instruction of each kind."""
IMAGE = dict(pair.split("=", 1) for pair in FILE["ENV"].split())


def command_of(entry: list[str], words: list[str], environment: dict[str, str]) -> Command:
    """What a container runs, whose variables are all ours."""
    assert entry[0] == "vnext" and unknown_variables(environment, every_option()) == []
    return parse([*entry[1:], *words], IMAGE | environment)


def is_path_of(command: Command, path: str) -> bool:
    """Whether this program answers a path without a key."""
    return path in OPEN and (isinstance(command, RouterCommand) or path in {each.plain_path for each in ROUTES})


# ---- compose -----------------------------------------------------------------------------------------------------

GIVEN = {"IMAGE": "vnext", "MODELS": "/srv/models", "MODEL": "a", "VNEXT_API_KEY": "sk-1"}


def composed() -> dict[str, Any]:
    """The compose file with a user's variables."""
    text = (DEPLOY / "compose.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+):([?-])([^}]*)}", lambda each: GIVEN.get(each[1], each[3]), text))
    return found


@pytest.mark.parametrize("name", ["replica-a", "replica-b", "router"])
def test_a_composed_container_runs_what_we_have(name: str) -> None:
    services = composed()["services"]
    service = services[name]
    command = command_of(service.get("entrypoint", json.loads(FILE["ENTRYPOINT"])), service["command"], service["environment"])
    http = command.settings.http if isinstance(command, RouterCommand) else command.server
    assert (http.host, http.port, http.api_keys) == ("0.0.0.0", 8000, ("sk-1",))
    assert int(service["stop_grace_period"][:-1]) > http.drain_s + 2 * GRACE_S and service["init"]
    [path] = re.findall(r":8000(/\w+)'", service["healthcheck"]["test"][-1])
    assert is_path_of(command, path) and compile(service["healthcheck"]["test"][-1], "probe", "exec")
    if isinstance(command, RouterCommand):
        assert [f"http://{each}:8000" for each in service["depends_on"]] == list(command.settings.backends)
        assert set(service["depends_on"]) < set(services)
        assert command.settings.backend_api_key == "sk-1", "or no replica is ready for it"
    else:
        mounts = {target: source for source, target in (each.split(":")[:2] for each in service["volumes"])}
        assert set(mounts) == {"/models", *FILE["VOLUME"].split()} and mounts["/models"] == GIVEN["MODELS"]
        assert command.engine.packed_weights_dir.startswith(IMAGE["HF_HOME"]) and command.engine.log_dir in mounts


def test_what_is_mounted_is_there() -> None:
    found = composed()
    for service in found["services"].values():
        for source in (each.split(":")[0] for each in service.get("volumes", ())):
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in found["volumes"] or source == GIVEN["MODELS"]
    logs = [each for service in found["services"].values() for each in service.get("volumes", ()) if each.endswith("log/vnext")]
    assert len(logs) == len(set(logs)) == 2, "each replica has logs of its own"
    assert all(isinstance(yaml.safe_load(each["content"]), dict) for each in found["configs"].values())


def test_no_file_names_a_registry() -> None:
    paths = [path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".tpl", ".txt")]
    named = [(path.name, image) for path in paths for image in re.findall(r"^\s*image: (\S+)", path.read_text(), re.M)]
    assert len(named) >= 4 and all(image[:2] in ("${", "{{", '""') for _, image in named), named


def test_the_compose_file_is_one() -> None:
    compose = pytest.importorskip("compose_spec", reason="compose-spec is not installed: pip install '.[deploy]'")
    found = composed()
    compose.PyCompose.from_json(json.dumps(found)).validate()
    found["services"]["router"]["stop_grace_perod"] = "60s"
    with pytest.raises(ValueError, match="stop_grace_perod"):
        compose.PyCompose.from_json(json.dumps(found))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: it comes with Debian's package prometheus")
def test_prometheus_reads_its_configuration() -> None:
    ran = subprocess.run(["promtool", "check", "config", "prometheus.yaml"], cwd=DEPLOY, capture_output=True, text=True)
    assert ran.returncode == 0 and "SUCCESS: 1 rule files found" in ran.stdout, ran.stdout + ran.stderr


def test_prometheus_asks_every_server() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    asked = {target for job in jobs for group in job["static_configs"] for target in group["targets"]}
    assert asked == {f"{name}:8000" for name, service in composed()["services"].items() if "profiles" not in service}


# ---- chart -------------------------------------------------------------------------------------------------------

LEAST = {"image": "vnext:1", "model": "/models/a"}
MUCH = LEAST | {
    "models": {"claim": "weights"}, "replicas": 3, "args": ["--max-num-seqs", "64"], "secret": "keys", "drainSeconds": 100,
    "resources": {"limits": {"nvidia.com/gpu": 1}}, "nodeSelector": {"kind": "gpu"}, "imagePullSecrets": [{"name": "own"}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "cache": {"size": ""}, "logs": {"storageClass": "fast"},
    "router": {"policy": "least_loaded", "args": ["--max-connections", "100"], "replicas": 2},
}  # fmt: skip


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """What the chart makes of these values, by kind and name, of a release "prod"."""
    helm = pytest.importorskip("helm_python", reason="Helm is not installed: pip install '.[deploy]'")
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="prod")
    found = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_helm_finds_nothing_in_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not installed: pip install '.[deploy]'")
    for values in (LEAST, MUCH):
        found = helm.lint(CHART, values, strict=True)
        assert found["errors"] == [] and [each["error"] for each in found["messages"]] == ["icon is recommended"]
    for lacking, words in (("image", "--set image=IMAGE"), ("model", "--set model=/models/NAME")):
        with pytest.raises(helm.HelmRenderError, match=words):
            rendered({name: value for name, value in LEAST.items() if name != lacking})


@pytest.mark.parametrize("values", [LEAST, MUCH], ids=["least", "much"])
def test_kubernetes_takes_what_comes_out(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: pip install '.[deploy]'")
    found = rendered(values)
    for each in found.values():
        validate.validate(each, KUBERNETES, strict=True)
    found["Deployment", "prod-router"]["spec"]["replcas"] = 2
    with pytest.raises(validate.ValidationError, match="replcas"):
        validate.validate(found["Deployment", "prod-router"], KUBERNETES, strict=True)


@pytest.mark.parametrize("values", [LEAST, MUCH], ids=["least", "much"])
def test_a_pod_runs_what_we_have_and_has_time_to_end(values: dict[str, Any]) -> None:
    found = rendered(values)
    drain_s = values.get("drainSeconds", ServerSettings().drain_s)
    for kind, name in (("StatefulSet", "prod-replica"), ("Deployment", "prod-router")):
        template = found[kind, name]["spec"]["template"]
        pod, [container] = template["spec"], template["spec"]["containers"]
        keys = {each["name"]: each["valueFrom"]["secretKeyRef"]["key"] for each in container.get("env", ())}
        given = {name: f"sk-{key}" for name, key in keys.items() if name.startswith("VNEXT_")}
        command = command_of(container.get("command", json.loads(FILE["ENTRYPOINT"])), container["args"], given)
        assert isinstance(command, RouterCommand if kind == "Deployment" else ServeCommand)
        http = command.settings.http if isinstance(command, RouterCommand) else command.server
        pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert http.drain_s == drain_s and pod["terminationGracePeriodSeconds"] > drain_s + pause_s + 2 * GRACE_S
        assert (container["livenessProbe"]["httpGet"]["path"], container["readinessProbe"]["httpGet"]["path"]) == ("/live", "/health")
        assert all(is_path_of(command, container[each]["httpGet"]["path"]) for each in container if each.endswith("Probe"))
        assert container["ports"] == [{"name": "http", "containerPort": int(FILE["EXPOSE"])}]
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['fsGroup']}" == FILE["USER"]
        assert pod["enableServiceLinks"] is False, "a Service named vnext would set VNEXT_PORT"
        assert http.api_keys == (("sk-VNEXT_API_KEY",) if "secret" in values else ())
        if isinstance(command, RouterCommand):
            assert command.settings.backend_api_key == "".join(http.api_keys), "or no replica is ready for it"


@pytest.mark.parametrize("values", [LEAST, MUCH], ids=["least", "much"])
def test_the_router_knows_every_replica_by_name(values: dict[str, Any]) -> None:
    found = rendered(values)
    replicas, router = found["StatefulSet", "prod-replica"]["spec"], found["Deployment", "prod-router"]["spec"]
    headless = found["Service", replicas["serviceName"]]["spec"]
    [container] = router["template"]["spec"]["containers"]
    named = [word for before, word in zip(container["args"], container["args"][1:]) if before == "--backend"]
    assert named == [f"http://prod-replica-{number}.{replicas['serviceName']}:8000" for number in range(replicas["replicas"])]
    assert headless["clusterIP"] == "None" and headless["ports"][0]["port"] == 8000
    for spec, service in ((replicas, "prod-replica"), (router, "prod")):
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == found["Service", service]["spec"]["selector"] == labels


@pytest.mark.parametrize("values", [LEAST, MUCH], ids=["least", "much"])
def test_what_a_replica_mounts_is_declared_and_writable(values: dict[str, Any]) -> None:
    spec = rendered(values)["StatefulSet", "prod-replica"]["spec"]
    pod = spec["template"]["spec"]
    mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    claimed = [each["metadata"]["name"] for each in spec["volumeClaimTemplates"] or ()]
    assert sorted(mounted) == sorted([*claimed, *(each["name"] for each in pod["volumes"])])
    assert [mounted["logs"], mounted["cache"]] == FILE["VOLUME"].split()
    assert ("cache" in claimed) == (values is LEAST) and ("models" in mounted) == (values is MUCH)


def test_the_chart_uses_all_its_values_and_no_others() -> None:
    """Read plainly, also where there is no Helm."""
    declared = set(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    used |= {f"{name}.{leaf}" for name in ("cache", "logs") for leaf in ("size", "storageClass")}  # by `index`, in a loop
    assert used == declared
    defined, included = (set(re.findall(rf'{word} "([\w.]+)"', text)) for word in ("define", "include"))
    assert defined == included


def leaves(values: dict[str, Any], above: str = "") -> list[str]:
    """The paths of all values; an empty object is one."""
    return [
        path
        for name, value in values.items()
        for path in (leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else [above + name])
    ]
