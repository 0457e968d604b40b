"""What is deployed beside Airflow and the service: Ray, Prometheus, Grafana, systemd. No container engine is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support import postgres

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
RAY_COMPOSE = yaml.safe_load((DOCKER / "compose.ray.yaml").read_text())
COMPOSE_FILES = pytest.mark.parametrize("compose", [COMPOSE, RAY_COMPOSE], ids=["compose.yaml", "compose.ray.yaml"])
BOARD = json.loads((DOCKER / "grafana/dashboards/elasticflow.json").read_text())
PROMETHEUS = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
ALERTS = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())
UNIT = (DOCKER / "systemd/elasticflow.service").read_text()

TEXTS = {"type": "array", "items": {"type": "string"}}
DURATION = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
HEALTHCHECK = {
    "type": "object",
    "required": ["test"],
    "properties": {
        "test": {**TEXTS, "minItems": 2, "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
        "interval": DURATION,
        "timeout": DURATION,
        "start_period": DURATION,
        "retries": {"type": "integer"},
    },
    "additionalProperties": False,
}
COMPOSE_SCHEMA = {
    "type": "object",
    "required": ["name", "services"],
    "patternProperties": {
        "^x-": {},
        "^(configs|secrets)$": {
            "additionalProperties": {
                "type": "object",
                "required": ["file"],
                "properties": {"file": {"type": "string"}},
                "additionalProperties": False,
            }
        },
    },
    "properties": {
        "name": {"type": "string"},
        "volumes": {"type": "object"},
        "services": {
            "additionalProperties": {
                "type": "object",
                "required": ["image", "restart"],
                "properties": {
                    "build": {
                        "type": "object",
                        "required": ["context", "dockerfile", "target"],
                        "additionalProperties": {"type": "string"},
                    },
                    "image": {"type": "string"},
                    "command": {"type": ["string", "array"]},
                    "entrypoint": TEXTS,
                    "secrets": TEXTS,
                    "configs": {"type": "array", "items": {"required": ["source", "target"]}},
                    "volumes": {"type": "array", "items": {"pattern": "^[^:]+:/[^:]*(:ro)?$"}},
                    "environment": {"additionalProperties": {"type": "string"}},
                    "ports": {"type": "array", "items": {"pattern": "^127[.]0[.]0[.]1:[0-9]+:[0-9]+$"}},
                    "healthcheck": HEALTHCHECK,
                    "depends_on": {
                        "additionalProperties": {
                            "required": ["condition"],
                            "properties": {"condition": {"pattern": "^service_(healthy|completed_successfully)$"}},
                        }
                    },
                    "restart": {"enum": ["no", "unless-stopped"]},
                    "shm_size": {"type": "string"},
                    "stop_grace_period": DURATION,
                    "init": {"type": "boolean"},
                    "hostname": {"type": "string"},
                },
                "additionalProperties": False,
            }
        },
    },
    "additionalProperties": False,
}
"""The part of the compose specification that the files use, and our own rules: ports of this machine alone."""


@COMPOSE_FILES
def test_the_compose_file_is_well_formed(compose: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(COMPOSE_SCHEMA).validate(compose)


@COMPOSE_FILES
def test_no_image_is_unpinned(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+", service["image"]), f"{name}: {service['image']} names no version"
    for image in re.findall(r"^FROM (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        assert image in ("base", "service") or re.fullmatch(r"python:\$\{PYTHON\}-slim", image), image
    assert re.search(r"^ARG PYTHON=3\.\d+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)


@COMPOSE_FILES
def test_everything_that_stays_up_has_a_healthcheck(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if service["restart"] != "no" and service["image"] != "elasticflow-service":
            assert "healthcheck" in service, name
    assert "HEALTHCHECK" in (DOCKER / "Dockerfile").read_text()


@COMPOSE_FILES
def test_every_mounted_file_is_there(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (DOCKER / source).exists(), f"{name} mounts {source}"
    for config in compose.get("configs", {}).values():
        assert (DOCKER / config["file"]).exists()


def replicas_of_ray() -> dict[str, Any]:
    found = {name: each for name, each in RAY_COMPOSE["services"].items() if name.startswith("elasticflow")}
    assert len(found) == 2
    return found


def test_ray_has_one_image_one_token_and_one_folder() -> None:
    services = RAY_COMPOSE["services"]
    head, replicas = services["ray-head"], replicas_of_ray()
    workers = {name: each for name, each in services.items() if name.startswith("ray-worker")}
    settings = replicas["elasticflow-1"]["environment"]
    assert len(workers) == 2
    assert all(each["hostname"] == name for name, each in (workers | replicas).items())
    for each in (head, *replicas.values(), *workers.values()):
        assert each["image"] == "elasticflow-ray"
        assert each["build"]["target"] == "ray"
        assert each["environment"]["RAY_AUTH_MODE"] == "token"
        assert each["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        assert "ray_token" in each["secrets"]
    shared = f"shared:{settings['ELASTICFLOW_SHARED_DIR']}"
    assert all(shared in each["volumes"] for each in (replicas | workers).values())
    assert settings["ELASTICFLOW_RAY_ADDRESS"] == "ray://ray-head:10001"
    assert "--num-cpus=0 --num-gpus=0" in head["command"]
    assert all("--address=ray-head:6379" in each["command"] for each in workers.values())


def test_the_compose_file_of_ray_sets_settings_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    known = {f"ELASTICFLOW_{name.upper()}" for name in ServiceSettings.model_fields}
    for service in replicas_of_ray().values():
        assert set(re.findall(r"ELASTICFLOW_[A-Z_]+[A-Z]", json.dumps(service))) <= known
        for name, value in service["environment"].items():
            monkeypatch.setenv(name, value)
        settings = ServiceSettings()
        assert (settings.engine, settings.ray_reserved) == ("ray", True)


def test_the_replicas_of_the_compose_file_differ_only_in_where_they_are(tmp_path: Path) -> None:
    """Each has a folder and a port of its own, says its own name to the other, and shares the rest."""
    from elasticflow_airflow.service.settings import ServiceSettings

    one, other = replicas_of_ray().values()
    own = {"hostname", "ports", "volumes"}
    assert {name for name in one if one[name] != other.get(name)} == own
    folders = [mount for each in (one, other) for mount in each["volumes"] if mount.endswith(":/var/lib/elasticflow")]
    assert len(set(folders)) == 2
    assert set(one["ports"]).isdisjoint(other["ports"])
    assert "/readyz" in json.dumps(one["healthcheck"])
    script = one["command"][-1].replace("$$", "$").replace("/run/secrets/postgres_password", str(tmp_path / "p"))
    (tmp_path / "p").write_text("secret\n")
    (tmp_path / "elasticflow").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "elasticflow").chmod(0o755)
    search = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        [*one["command"][:-1], script], env={"PATH": search}, capture_output=True, text=True, check=True
    )
    given = dict(line.partition("=")[::2] for line in said.stdout.splitlines())
    assert given["ELASTICFLOW_DATABASE_URL"] == "postgresql://elasticflow:secret@postgres/elasticflow"
    url = given["ELASTICFLOW_ADVERTISE_URL"]
    assert ServiceSettings(advertise_url=url).advertise_url == f"http://{os.uname().nodename}:8321"
    assert url.endswith(":8321")


def test_the_connection_that_the_compose_file_names_reaches_both_replicas() -> None:
    from elasticflow_airflow.client import Endpoint

    (host,) = re.findall(r"with the host (\S+)[.]$", (DOCKER / "compose.ray.yaml").read_text(), re.MULTILINE)
    ports = {port.split(":")[1] for each in replicas_of_ray().values() for port in each["ports"]}
    urls = [f"http://{one}" for one in host.split(",")]
    endpoint = Endpoint.from_url(",".join(urls), token="t")
    assert {url.rpartition(":")[2] for url in urls} == ports
    assert endpoint.base_url == urls[0]


def test_the_options_of_ray_are_those_that_there_are() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed: pip install 'ray[client]'")
    known = {option for parameter in scripts.start.params for option in parameter.opts}
    commands = [each["command"] for name, each in RAY_COMPOSE["services"].items() if name.startswith("ray-")]
    pages = "".join((ROOT / f"docs/how-to/{name}.md").read_text() for name in ("ray", "slurm"))
    commands += re.findall(r"^.*\bray start (?:.*\\\n)*.*$", pages, re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        assert set(re.findall(r"(--[a-z-]+)", command.partition("ray start")[2])) <= known, command


def test_airflow_checks_jobs_that_there_are() -> None:
    from importlib import import_module

    runners = {
        "SchedulerJob": "airflow.jobs.scheduler_job_runner:SchedulerJobRunner",
        "DagProcessorJob": "airflow.jobs.dag_processor_job_runner:DagProcessorJobRunner",
        "TriggererJob": "airflow.jobs.triggerer_job_runner:TriggererJobRunner",
    }
    checked = re.findall(r'"--job-type", "(\w+)"', json.dumps(COMPOSE))
    assert sorted(checked) == sorted(runners)
    for job_type, where in runners.items():
        module, _, name = where.partition(":")
        assert getattr(import_module(module), name).job_type == job_type


# -- Prometheus and Grafana ------------------------------------------------------------------------------------------


def queries() -> list[tuple[str, str]]:
    """Where each query stands, and what it asks, as Prometheus would get it."""
    found = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
    found += [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]
    return [(where, expr.replace("$__rate_interval", "1m").replace("$instance", ".*")) for where, expr in found]


def selectors(expr: str) -> list[tuple[str, dict[str, str]]]:
    """Every metric that a query reads, with the labels that it asks for, by Prometheus' own grammar."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed: pip install promql-parser")
    found: list[tuple[str, dict[str, str]]] = []

    def walk(node: object) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append((node.name, {m.name: m.value for m in node.matchers.matchers}))
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
            child = getattr(node, name, None)
            if child is not None:
                walk(child)
        for child in getattr(node, "args", None) or ():
            walk(child)

    walk(promql.parse(expr))
    return found


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Labels of every sample that a service exposes, by name: one with a job that trained and one that trains.

    A replica, as it exposes most; where there is no PostgreSQL, what only replicas expose is taken for granted.
    """
    base = Path(tmp_path_factory.mktemp("m"))
    (base / "code").mkdir()
    (base / "code/train.py").write_text("print('training')\n")
    settings = {"ELASTICFLOW_ENGINE": "fake", "ELASTICFLOW_SLOT_LOCK_DIR": str(base / "locks")}
    state = Path(tempfile.mkdtemp(prefix="ef-"))  # Short enough for a socket.
    with ExitStack() as stack:
        has_postgres = postgres.why_not() is None
        url = stack.enter_context(postgres.service_database("postgresql" if has_postgres else "sqlite"))
        found = _exposed_by(state, base, settings if url is None else {**settings, "ELASTICFLOW_DATABASE_URL": url})
    return found | ({} if has_postgres else {name: [{}] for name in ONLY_OF_REPLICAS})


ONLY_OF_REPLICAS = ("elasticflow_leader_epoch", "elasticflow_failed_over_timestamp_seconds")


def _exposed_by(state: Path, base: Path, settings: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    from prometheus_client.parser import text_string_to_metric_families

    from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
    from elasticflow_airflow.client import ElasticFlowClient, ensure_service, snapshot_folder

    endpoint = ensure_service(state, settings)
    try:
        with ElasticFlowClient(endpoint) as client:
            snapshot = snapshot_folder(base / "code")
            client.upload_snapshot(snapshot)
            job = client.submit(
                JobSubmission(
                    identity=JobIdentity(dag_id="daily", run_id="r", task_id="train"),
                    command=Command(snapshot=snapshot.sha256, script="train.py"),
                    length=Length(steps=100_000),
                    global_batch_size=8,
                    deadline_at=time.time() + 10**6,
                    scaling_curve={1: 10.0, 2: 18.0},
                )
            ).job
            limit = time.monotonic() + 60
            while client.status(job.job_id).projected_finish_at is None:
                assert time.monotonic() < limit, client.status(job.job_id)
                time.sleep(0.1)
            with endpoint.open_client(10.0) as http:
                text = http.get("/metrics").text
    finally:
        pid = json.loads((state / "service.json").read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        limit = time.monotonic() + 30
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < limit
            time.sleep(0.05)
        shutil.rmtree(state)
    found: dict[str, list[dict[str, str]]] = {"up": [{"job": "elasticflow"}]}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_every_query_asks_for_what_the_service_exposes(exposed: dict[str, list[dict[str, str]]]) -> None:
    asked = [(where, name, labels) for where, expr in queries() for name, labels in selectors(expr)]
    assert len(asked) > 25
    for where, name, labels in asked:
        assert name in exposed, f"{where!r} asks for {name}, which the service does not expose"
        for label, value in labels.items():
            if label in ("instance", "job"):
                continue  # Prometheus adds them.
            values = {sample.get(label) for sample in exposed[name]}
            assert any(v is not None and re.fullmatch(value, v) for v in values), f"{where!r}: no {label}={value!r}"


def test_what_queries_group_by_are_labels(exposed: dict[str, list[dict[str, str]]]) -> None:
    for where, expr in queries():
        names = [name for name, _ in selectors(expr)]
        for groups in re.findall(r"(?:by|without) \(([^)]*)\)", expr):
            for label in (part.strip() for part in groups.split(",")):
                if label in ("instance", "job"):
                    continue  # Prometheus adds them.
                assert any(label in sample for name in names for sample in exposed[name]), (
                    f"{where!r} groups by {label}"
                )


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), (panel["title"], label)


def test_panels_do_not_overlap_and_are_explained() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert panel["description"], panel["title"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken.get(cell))
            taken[cell] = panel["title"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_dashboard_uses_the_data_source_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    used = set(re.findall(r'"uid": "([^"]+)"', json.dumps(BOARD["panels"])))
    assert used == {source["uid"]}
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/elasticflow.yaml").read_text())["providers"]
    mounts = {mount.split(":")[1] for mount in COMPOSE["services"]["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounts
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_asks_the_service_with_the_token_that_opens_nothing_else() -> None:
    (scrape,) = PROMETHEUS["scrape_configs"]
    (targets,) = scrape["static_configs"]
    service, _, port = targets["targets"][0].partition(":")
    assert service in COMPOSE["services"]
    assert f'"--port", "{port}"' in (DOCKER / "Dockerfile").read_text()
    secret = Path(scrape["authorization"]["credentials_file"]).name
    assert secret in COMPOSE["services"]["prometheus"]["secrets"]
    assert COMPOSE["services"]["elasticflow"]["environment"]["ELASTICFLOW_METRICS_TOKEN_FILE"].endswith(secret)
    assert secret != "elasticflow_token"
    assert [Path(file).name for file in PROMETHEUS["rule_files"]] == ["alerts.yml"]


def test_alerts_say_what_to_do() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


# -- systemd ---------------------------------------------------------------------------------------------------------


def test_the_unit_sets_settings_that_there_are() -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    known = {f"ELASTICFLOW_{name.upper()}" for name in ServiceSettings.model_fields}
    assert set(re.findall(r"^Environment=(ELASTICFLOW_\w+)=", UNIT, re.MULTILINE)) <= known
    assert "KillMode=process" in UNIT.splitlines()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = tmp_path / "elasticflow.service"
    unit.write_text(
        UNIT.replace("/opt/elasticflow/bin/elasticflow", "/bin/true").replace("User=elasticflow", "User=root")
    )
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "elasticflow.service" in line]
    assert not ours, ours


# -- the pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deploy", "monitor", "kuberay", "replicas"])
def test_yaml_on_the_pages_is_yaml(name: str) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / f"docs/how-to/{name}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert isinstance(yaml.safe_load(block), dict)


def test_files_that_the_pages_name_are_there() -> None:
    for name in ("deploy", "monitor", "kuberay", "ray", "replicas", "slurm"):
        for path in re.findall(r"\bdocker/[\w./-]+\w", (ROOT / f"docs/how-to/{name}.md").read_text()):
            assert (ROOT / path).exists(), f"{name}.md names {path}"


def test_the_page_lists_every_metric(exposed: dict[str, list[dict[str, str]]]) -> None:
    listed = set(re.findall(r"`(elasticflow_[a-z_]+)", (ROOT / "docs/how-to/monitor.md").read_text()))
    ours = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exposed if name.startswith("elasticflow_")}
    assert ours == listed
