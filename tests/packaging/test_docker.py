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

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())


def stage(name: str) -> str:
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert found, f"the Dockerfile has no stage {name}"
    return found[1]


def pip_steps(name: str) -> list[str]:
    return re.findall(r"^RUN (pip install .*)$", stage(name), re.MULTILINE)


def test_compose_builds_targets_that_exist() -> None:
    for service in COMPOSE["services"].values():
        if "build" in service:
            assert stage(service["build"]["target"])


def test_compose_mounts_every_secret_that_it_reads() -> None:
    for name, service in COMPOSE["services"].items():
        named = set(re.findall(r"/run/secrets/(\w+)", json.dumps(service)))
        assert named <= set(service.get("secrets", ())), name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])


def test_compose_holds_no_secret() -> None:
    for service in COMPOSE["services"].values():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET|CONN", key):
                assert "/run/secrets/" in value, f"{key} stands in the compose file"


def test_compose_depends_on_services_that_exist_and_can_be_healthy() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy" and other != "elasticflow":
                assert "healthcheck" in services[other]
    assert "HEALTHCHECK" in stage("service")


def test_every_copied_file_is_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE):
        assert (ROOT / line).exists(), line


@pytest.fixture(scope="session")
def service_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's environment, made by the very steps of the image, without torch."""
    where = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", str(where / "venv")], check=True)
    environment = {**os.environ, "PATH": f"{where / 'venv/bin'}:{os.environ['PATH']}"}
    for step in pip_steps("service"):
        if "$TORCH" in step:
            continue
        command = step.replace("/tmp/service.txt", str(ROOT / "requirements/service.txt"))
        command = command.replace("/tmp/*.whl", str(wheel))
        subprocess.run(["bash", "-euc", command], check=True, env=environment, capture_output=True)
    return where / "venv"


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
