"""The image's install steps and the compose file, as far as they can be tried without a container engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE_FILE = (ROOT / "docker/compose.yaml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_FILE)
RAY_COMPOSE_FILE = (ROOT / "docker/compose.ray.yaml").read_text()
RAY_COMPOSE = yaml.safe_load(RAY_COMPOSE_FILE)
COMPOSE_FILES = pytest.mark.parametrize("compose", [COMPOSE, RAY_COMPOSE], ids=["compose.yaml", "compose.ray.yaml"])

WHAT_AIRFLOW_SEES = """
import json
from cryptography.fernet import Fernet
from sqlalchemy import make_url
from airflow import settings
from airflow.providers_manager import ProvidersManager
from airflow.sdk.configuration import conf
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.operators import ElasticTrainOperator

Fernet(conf.get("core", "fernet_key").encode())
endpoint = ElasticFlowHook().endpoint()
urls = [make_url(url) for url in (settings.SQL_ALCHEMY_CONN, settings.SQL_ALCHEMY_CONN_ASYNC)]
print(json.dumps({
    "databases": [[url.username, url.password, url.host, url.database] for url in urls],
    "secrets": [conf.get("api_auth", "jwt_secret").strip(), conf.get("api", "secret_key").strip()],
    "provider": "elasticflow-airflow" in ProvidersManager().providers,
    "service": endpoint.base_url,
    "token": endpoint.token,
}))
"""


def stage(name: str) -> str:
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert found, f"the Dockerfile has no stage {name}"
    return found[1]


def pip_steps(name: str) -> list[str]:
    return re.findall(r"^RUN (pip install .*)$", stage(name), re.MULTILINE)


@COMPOSE_FILES
def test_compose_builds_targets_that_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            assert stage(service["build"]["target"])


@COMPOSE_FILES
def test_compose_mounts_every_secret_that_it_reads(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        named = set(re.findall(r"/run/secrets/(\w+)", json.dumps(service)))
        assert named <= set(service.get("secrets", ())), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"])


@COMPOSE_FILES
def test_compose_holds_no_secret(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET|CONN", key):
                assert "/run/secrets/" in value, f"{key} stands in the compose file"


@COMPOSE_FILES
def test_compose_depends_on_services_that_exist_and_can_be_healthy(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy" and other != "elasticflow":
                assert "healthcheck" in services[other]
    assert "HEALTHCHECK" in stage("service")


@COMPOSE_FILES
def test_compose_covers_only_folders_whose_owner_may_write(compose: dict[str, Any]) -> None:
    """A new volume takes the owner of the image's folder beneath it; without one it is root's."""
    for name, service in compose["services"].items():
        for mount in service.get("volumes", ()) if "build" in service else ():
            source, target = mount.split(":")[:2]
            if source in compose["volumes"]:
                below = {"ray": stage("service") + stage("ray")}
                image = stage("base") + below.get(service["build"]["target"], stage(service["build"]["target"]))
                made = re.findall(r"install --directory --owner=elasticflow (.*)", image)
                assert target in " ".join(made).split(), f"{name}: the image does not make {target}"


def make_secrets(where: Path, compose_file: str = COMPOSE_FILE) -> Path:
    """The secrets, by the very commands that the compose file names."""
    commands = re.findall(r"^#   (.*)$", compose_file, re.MULTILINE)
    shell = "\n".join(command for command in commands if not command.startswith("docker compose"))
    subprocess.run(["bash", "-euc", shell], cwd=where, check=True)
    return where / "docker/secrets"


@pytest.mark.parametrize("compose_file", [COMPOSE_FILE, RAY_COMPOSE_FILE], ids=["compose.yaml", "compose.ray.yaml"])
def test_the_commands_of_the_compose_file_make_every_secret(compose_file: str, tmp_path: Path) -> None:
    made = {file.name for file in make_secrets(tmp_path, compose_file).iterdir() if len(file.read_text()) > 40}
    secrets = yaml.safe_load(compose_file)["secrets"]
    assert made == set(secrets)
    assert {f"secrets/{name}" for name in made} == {secret["file"] for secret in secrets.values()}


def test_no_secret_is_sent_to_the_builder() -> None:
    assert "docker/secrets" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_every_copied_file_is_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE):
        assert (ROOT / line).exists(), line


def image_venv(target: str, wheel: Path, where: Path) -> Path:
    """The environment of an image, made by its very steps, without torch."""
    subprocess.run([sys.executable, "-m", "venv", str(where / "venv")], check=True)
    # What is not imported need not be compiled.
    environment = {**os.environ, "PATH": f"{where / 'venv/bin'}:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}
    for step in pip_steps(target):
        if "$TORCH" in step:
            continue
        command = re.sub(r"/tmp/(\w+\.txt)", rf"{ROOT}/requirements/\1", step).replace("/tmp/*.whl", str(wheel))
        done = subprocess.run(["bash", "-euc", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return where / "venv"


@pytest.fixture(scope="session")
def service_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_venv("service", wheel, tmp_path_factory.mktemp("service"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_airflow_finds_the_provider_its_database_and_the_service(wheel: Path, tmp_path: Path) -> None:
    """With the environment that the compose file gives each Airflow component, through its entrypoint."""
    venv = image_venv("airflow", wheel, tmp_path)
    secrets = make_secrets(tmp_path)
    (common,) = {
        json.dumps(s["environment"]) for s in COMPOSE["services"].values() if s.get("image") == "elasticflow-airflow"
    }
    entrypoint = tmp_path / "entrypoint.sh"
    script = (ROOT / "docker/airflow-entrypoint.sh").read_text()
    entrypoint.write_text(script.replace("/run/secrets/", f"{secrets}/"))
    done = subprocess.run(
        ["bash", str(entrypoint), "python", "-c", WHAT_AIRFLOW_SEES],
        env={
            **json.loads(common.replace("/run/secrets/", f"{secrets}/")),
            "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    secret = {file.name: file.read_text().strip() for file in secrets.iterdir()}
    assert seen == {
        "databases": [["airflow", secret["postgres_password"], "postgres", "airflow"]] * 2,
        "secrets": [secret["airflow_jwt_secret"], secret["airflow_secret_key"]],
        "provider": True,
        "service": "http://elasticflow:8321",
        "token": secret["elasticflow_token"],
    }


@pytest.mark.slow
def test_the_service_serves_where_there_is_no_airflow(service_venv: Path, tmp_path: Path) -> None:
    installed = subprocess.run(
        [str(service_venv / "bin/pip"), "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    assert "apache-airflow" not in installed
    assert "torch" not in installed
    environment = {
        "PATH": f"{service_venv / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ELASTICFLOW_STATE_DIR": str(tmp_path / "state"),
        "ELASTICFLOW_SLOT_LOCK_DIR": str(tmp_path / "slots"),
        "ELASTICFLOW_TOKEN": "a-token-for-this-test",
    }
    port = _free_port()
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["elasticflow", "serve", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            executable=str(service_venv / "bin/elasticflow"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        health = _wait_for_health(port, process, log)
        assert health["status"] == "ok"
        assert health["engine"] == "local"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health", timeout=5)
        assert refused.value.code == 401
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            assert answer.status == 200
    finally:
        process.terminate()
        process.wait(20)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for_health(port: int, process: subprocess.Popen[bytes], log: Path) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/health", headers={"Authorization": "Bearer a-token-for-this-test"}
    )
    limit = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return dict(json.load(answer))
        except urllib.error.URLError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
