"""The Helm chart, rendered without a cluster: what it makes, what it refuses, and what its pods may do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: pip install helm-python-sdk")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker/helm"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
PAGE = (ROOT / "docs/how-to/kuberay.md").read_text()

NAMESPACED = {
    "Deployment",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "RayCluster",
    "Service",
    "ServiceAccount",
    "StatefulSet",
}
LOCAL: dict[str, Any] = {"engine": "local", "service": {"gpus": 4, "slots": 2}}
OTHER: dict[str, Any] = {
    "fullnameOverride": "training",
    "image": {"repository": "registry.example/mine", "tag": "7", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "secrets": {"service": "s", "nodes": "n", "ray": "r", "database": "d", "keys": "k"},
    "service": {
        "replicas": 1,
        "settings": {"ELASTICFLOW_LOG_LEVEL": "debug"},
        "slots": 2,
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "podAnnotations": {"example.com/team": "ml"},
        "state": {"storageClass": "ssd"},
    },
    "sharedStorage": {"existingClaim": "nfs"},
    "ray": {
        "version": "2.55.1",
        "workers": {"replicas": 3, "minReplicas": 1, "maxReplicas": 5, "gpus": 0, "cpus": 4, "memory": "16Gi"},
        "faultTolerance": {"redisAddress": "redis:6379", "redisSecret": "redis"},
    },
    "networkPolicy": {"from": [], "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]},
}
REPLICAS: dict[str, Any] = {"secrets": {"database": "elasticflow-database", "keys": "elasticflow-keys"}}
VALUES: dict[str, dict[str, Any]] = {"default": {}, "local": LOCAL, "other": OTHER, "replicas": REPLICAS}


def rendered(values: dict[str, Any]) -> dict[str, str]:
    with helm.Chart.load(CHART) as chart:
        manifests: dict[str, str] = chart.render(values, name="elasticflow", namespace="ml")
        return manifests


def objects_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = [text for name, text in rendered(values).items() if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


@pytest.fixture(params=VALUES, name="objects")
def _objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return objects_of(VALUES[request.param])


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def workload(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """What runs the service: a StatefulSet with its volume, or a Deployment of replicas."""
    (found,) = (each for each in objects if each["kind"] in ("StatefulSet", "Deployment"))
    return found


def templates(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The template of every pod that comes out of these objects."""
    for each in objects:
        if each["kind"] in ("StatefulSet", "Deployment"):
            yield each["spec"]["template"]
        elif each["kind"] == "RayCluster":
            for group in (each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]):
                yield group["template"]


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for template in templates(objects):
        yield template["spec"]


def containers(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for pod in pods(objects):
        yield from pod.get("initContainers", ())
        yield from pod["containers"]


def environment(container: dict[str, Any]) -> dict[str, str | None]:
    names = [variable["name"] for variable in container["env"]]
    assert len(set(names)) == len(names), names
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def service_container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = workload(objects)["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def ray_groups(objects: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = one(objects, "RayCluster")["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"], workers


def test_helm_has_no_complaint() -> None:
    report = helm.lint(CHART, strict=True)
    assert not report["errors"]
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def test_everything_is_in_the_namespace(objects: list[dict[str, Any]]) -> None:
    assert {each["kind"] for each in objects} <= NAMESPACED
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)


def test_the_version_is_the_packages() -> None:
    from elasticflow_airflow import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"engin": "ray"}, "engin"),
        ({"engine": "fake"}, "engine"),
        ({"service": {"gpus": "4"}}, "service/gpus"),
        ({"service": {"slots": 0}}, "service/slots"),
        ({"service": {"replicas": 0}}, "service/replicas"),
        ({"service": {"ipFamily": "both"}}, "service/ipFamily"),
        ({"service": {"settings": {"ELASTICFLOW_SECRET_KEY": "x"}}}, "ELASTICFLOW_SECRET_KEY"),
        ({"service": {"settings": {"ELASTICFLOW_ADVERTISE_URL": "x"}}}, "ELASTICFLOW_ADVERTISE_URL"),
        ({"service": {"settings": {"ELASTICFLOW_LOG_LEVEL": 1}}}, "ELASTICFLOW_LOG_LEVEL"),
        ({"service": {"settings": {"ELASTICFLOW_TOKEN": "x"}}}, "ELASTICFLOW_TOKEN"),
        ({"service": {"settings": {"ELASTICFLOW_RAY_ALLOW_INSECURE": "true"}}}, "ELASTICFLOW_RAY_ALLOW_INSECURE"),
        ({"service": {"settings": {"PATH": "/"}}}, "PATH"),
        ({"secrets": {"token": "x"}}, "token"),
        ({"ray": {"workers": {"memory": "much"}}}, "ray/workers/memory"),
        ({"ray": {"version": 2.6}}, "ray/version"),
        ({"ray": {"token": "x"}}, "token"),
        ({"networkPolicy": {"from": [{}]}}, "networkPolicy/from/0"),
        ({"fullnameOverride": "a-name-that-is-longer-than-a-ray-cluster-may-have"}, "fullnameOverride"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=re.escape(why)):
        rendered(values)


def test_the_schema_knows_every_value() -> None:
    def keys(values: Any, schema: dict[str, Any], at: str) -> None:
        if isinstance(values, dict) and schema.get("additionalProperties") is False:
            assert set(values) == set(schema["properties"]) - {"global"}, at
            for name, value in values.items():
                keys(value, schema["properties"][name], f"{at}.{name}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    keys(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


# -- what pods may do ------------------------------------------------------------------------------------------------


def test_every_container_is_restricted(objects: list[dict[str, Any]]) -> None:
    for container in containers(objects):
        assert container["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    for pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
        assert pod["automountServiceAccountToken"] is False
        assert pod["serviceAccountName"] == one(objects, "ServiceAccount")["metadata"]["name"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not any("hostPath" in volume for volume in pod["volumes"])
    assert one(objects, "ServiceAccount")["automountServiceAccountToken"] is False


def test_every_mount_has_its_volume(objects: list[dict[str, Any]]) -> None:
    claims = {claim["metadata"]["name"] for claim in workload(objects)["spec"].get("volumeClaimTemplates", ())}
    for pod in pods(objects):
        own = claims if any(container["name"] == "service" for container in pod["containers"]) else set()
        mounts = {mount["mountPath"]: mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert set(mounts.values()) == own | {volume["name"] for volume in pod["volumes"]}
        # The root is read-only, and Python, Ray and torch write here.
        (home,) = {env["value"] for each in pod["containers"] for env in each["env"] if env["name"] == "HOME"}
        assert {"/tmp", home} <= set(mounts)


def test_resources_are_bounded(objects: list[dict[str, Any]]) -> None:
    for container in containers(objects):
        assert "memory" in container["resources"]["limits"], container["name"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), container["name"]
    for pod in pods(objects):
        assert pod["terminationGracePeriodSeconds"] >= 30


def test_secrets_are_named_and_not_held(objects: list[dict[str, Any]]) -> None:
    for container in containers(objects):
        for variable in container["env"]:
            if re.search(r"TOKEN|PASSWORD|SECRET|DATABASE_URL", variable["name"]):
                value = variable.get("value")
                assert value is None or value.startswith("/run/secrets/"), variable
                assert value is not None or "secretKeyRef" in variable["valueFrom"], variable
    assert not any(each["kind"] == "Secret" for each in objects)


@pytest.mark.parametrize("values", [VALUES["default"], VALUES["local"], REPLICAS], ids=["ray", "local", "replicas"])
def test_the_page_and_the_notes_make_every_secret(values: dict[str, Any]) -> None:
    wanted = {
        (volume["secret"]["secretName"], item["key"])
        for pod in pods(objects_of(values))
        for volume in pod["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    notes = next(text for name, text in rendered(values).items() if name.endswith("NOTES.txt"))
    for text in (PAGE, notes):
        made = {
            (command.split()[0], key)
            for command in text.replace("\\\n", " ").split("create secret generic ")[1:]
            for key in re.findall(r"--from-file=([\w-]+)=", command)
        }
        assert wanted <= made
        assert "--from-literal" not in text, "whoever sees the processes would see the secret"
    deploy = (ROOT / "docs/how-to/deploy.md").read_text()
    assert "token" in (keys := set(re.findall(r"--from-file=([\w-]+)=", deploy)))
    assert {key for name, key in wanted if name == "elasticflow"} <= keys


# -- the service -----------------------------------------------------------------------------------------------------


def test_the_service_fits_the_image(objects: list[dict[str, Any]]) -> None:
    runs, service, container = workload(objects), one(objects, "Service"), service_container(objects)
    assert service["spec"]["selector"] == runs["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == runs["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == 8321
    assert json.dumps(container["args"]) in DOCKERFILE
    state = environment(container)["ELASTICFLOW_STATE_DIR"]
    assert re.search(r"ENV ELASTICFLOW_STATE_DIR=(\S+)", DOCKERFILE)[1] == state  # type: ignore[index]
    assert state in {mount["mountPath"] for mount in container["volumeMounts"]}
    probes = {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for probe, path in probes.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}


def test_settings_are_those_that_there_are(objects: list[dict[str, Any]]) -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    known = {f"ELASTICFLOW_{name.upper()}" for name in ServiceSettings.model_fields}
    for container in containers(objects):
        ours = {name for name in environment(container) if name.startswith("ELASTICFLOW_")}
        assert ours <= known
    named = set(re.findall(r"ELASTICFLOW_[A-Z_]+[A-Z]", (CHART / "values.yaml").read_text() + PAGE))
    assert named <= known | {"ELASTICFLOW_TOKEN"}


def test_the_service_takes_its_settings(
    objects: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    for name, value in environment(service_container(objects)).items():
        if name.startswith("ELASTICFLOW_") and value is not None:
            monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.0.0.5"))
    settings = ServiceSettings()
    assert settings.engine == ("ray" if any(each["kind"] == "RayCluster" for each in objects) else "local")
    assert settings.ray_reserved is (settings.engine == "ray")
    assert not settings.ray_allow_insecure


def test_token_files_are_mounted(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        items = {volume["name"]: volume["secret"]["items"] for volume in pod["volumes"] if "secret" in volume}
        (container,) = pod["containers"]
        files = {
            f"{mount['mountPath']}/{item['path']}"
            for mount in container["volumeMounts"]
            for item in items.get(mount["name"], ())
        }
        assert {value for value in environment(container).values() if value and "/run/secrets/" in value} == files


def test_with_the_engine_local_it_is_the_service_alone() -> None:
    objects = objects_of(LOCAL)
    assert not {"RayCluster", "PersistentVolumeClaim"} & {each["kind"] for each in objects}
    container = service_container(objects)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert environment(container)["ELASTICFLOW_SLOTS"] == "2"
    assert "RAY_AUTH_MODE" not in environment(container)
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert one(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0


# -- replicas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "count"),
    [
        ({}, "StatefulSet", 1),
        ({"engine": "local", "secrets": {"database": "d", "keys": "k"}}, "StatefulSet", 1),
        ({**REPLICAS, "service": {"replicas": 1}}, "StatefulSet", 1),
        (REPLICAS, "Deployment", 2),
        ({**REPLICAS, "service": {"replicas": 3}}, "Deployment", 3),
    ],
)
def test_there_are_two_where_another_one_can_take_over(values: dict[str, Any], kind: str, count: int) -> None:
    found = workload(objects_of(values))
    assert (found["kind"], found["spec"]["replicas"]) == (kind, count)
    assert ("volumeClaimTemplates" in found["spec"]) is (kind == "StatefulSet")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"service": {"replicas": 2}}, "2 replicas of the service cannot run on SQLite: .* secrets.database"),
        ({"engine": "local", **REPLICAS, "service": {"replicas": 2}}, "cannot run with the engine local"),
        ({"secrets": {"database": "d"}}, "without the same keys .* secrets.keys, or set service.replicas to 1"),
    ],
)
def test_replicas_that_cannot_take_over_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=why):
        rendered(values)


def test_replicas_are_exchanged_one_after_the_other_and_stand_apart() -> None:
    objects = objects_of(REPLICAS)
    spec = workload(objects)["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    (wish,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert wish["podAffinityTerm"]["labelSelector"] == spec["selector"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    (budget,) = (
        each["spec"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == "elasticflow"
    )
    assert budget == {"maxUnavailable": 1, "selector": spec["selector"]}
    given = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pod = workload(objects_of({**REPLICAS, "service": {"affinity": given}}))["spec"]["template"]["spec"]
    assert pod["affinity"] == given


def test_replicas_share_their_keys_and_not_their_folder() -> None:
    container = service_container(objects_of(REPLICAS))
    assert environment(container)["ELASTICFLOW_SECRET_KEY_FILE"] == "/run/secrets/keys/keys"
    pod = workload(objects_of(REPLICAS))["spec"]["template"]["spec"]
    (state,) = (volume for volume in pod["volumes"] if volume["name"] == "state")
    assert state["emptyDir"] == {"sizeLimit": "100Gi"}
    assert "ELASTICFLOW_SECRET_KEY_FILE" not in environment(service_container(objects_of({})))


@pytest.mark.parametrize(
    ("family", "url"), [("IPv4", "http://10.0.0.5:8321"), ("IPv6", "http://[fd00::5]:8321")], ids=["IPv4", "IPv6"]
)
def test_replicas_say_where_they_are_reached(family: str, url: str) -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    container = service_container(objects_of({**REPLICAS, "service": {"ipFamily": family}}))
    names = [variable["name"] for variable in container["env"]]
    assert names.index("POD_IP") < names.index("ELASTICFLOW_ADVERTISE_URL"), "it is put in only where it stands before"
    (address,) = (variable for variable in container["env"] if variable["name"] == "POD_IP")
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    given = str(environment(container)["ELASTICFLOW_ADVERTISE_URL"])
    ip = {"IPv4": "10.0.0.5", "IPv6": "fd00::5"}[family]
    assert ServiceSettings(advertise_url=given.replace("$(POD_IP)", ip)).advertise_url == url


STANDS = {"readyReplicas": 1, "currentRevision": "a", "updateRevision": "a"}
LEASES = {"elasticflow/elects-a-leader": "true"}


@contextmanager
def api_server(stateful_set: dict[str, Any] | None) -> Iterator[str]:
    """The part of Kubernetes' API that `lookup` asks, with one StatefulSet or none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            resource = {"name": "statefulsets", "namespaced": True, "kind": "StatefulSet", "verbs": ["get"]}
            known = {
                "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [resource]},
                "/apis/apps/v1/namespaces/ml/statefulsets/elasticflow": stateful_set,
            }
            found = known.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def upgraded(values: dict[str, Any], there: dict[str, Any] | None) -> dict[str, str]:
    """The manifests of an upgrade in a cluster with this StatefulSet."""
    about = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    with (
        api_server(None if there is None else {**about, **there}) as url,
        helm.Config(kube_apiserver=url, namespace="ml", storage_driver="memory") as cluster,
        helm.Chart.load(CHART) as chart,
    ):
        made: dict[str, str] = cluster.render(chart, values, name="elasticflow", namespace="ml", is_upgrade=True)
        return made


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"metadata": {"name": "elasticflow"}, "status": STANDS}, "earlier release, .*--set service.replicas=1"),
        ({"metadata": {"name": "elasticflow", "annotations": {"a": "b"}}, "status": STANDS}, "earlier release"),
        ({"metadata": {"annotations": LEASES}, "status": {**STANDS, "readyReplicas": 0}}, "not ready, .* wait"),
        ({"metadata": {"annotations": LEASES}, "status": {**STANDS, "updateRevision": "b"}}, "not ready"),
        ({"metadata": {"annotations": LEASES}}, "not ready"),
    ],
    ids=["earlier", "annotated", "away", "rolling", "new"],
)
def test_a_service_that_has_not_shared_its_volume_is_not_replaced(there: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=why):
        upgraded(REPLICAS, there)
    one = [*upgraded({**REPLICAS, "service": {"replicas": 1}}, there).values()]
    assert any("kind: StatefulSet" in text for text in one)


@pytest.mark.parametrize("there", [None, {"metadata": {"annotations": LEASES}, "status": STANDS}], ids=["none", "done"])
def test_a_service_that_has_shared_it_is_replaced_by_replicas(there: dict[str, Any] | None) -> None:
    assert any("kind: Deployment" in text for text in upgraded(REPLICAS, there).values())


# -- the Ray cluster -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "other", "replicas"])
def test_the_service_finds_the_cluster(name: str) -> None:
    objects = objects_of(VALUES[name])
    cluster, env = one(objects, "RayCluster"), environment(service_container(objects))
    assert len(cluster["metadata"]["name"]) <= 53
    # KubeRay names the head's service so.
    assert env["ELASTICFLOW_RAY_ADDRESS"] == f"ray://{cluster['metadata']['name']}-head-svc:10001"
    head, workers = ray_groups(objects)
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    images = {container["image"] for container in containers(objects)}
    assert len(images) == 1
    for container in (*head["template"]["spec"]["containers"], *workers["template"]["spec"]["containers"]):
        assert environment(container)["RAY_AUTH_MODE"] == env["RAY_AUTH_MODE"] == "token"
        assert environment(container)["RAY_AUTH_TOKEN_PATH"] == env["RAY_AUTH_TOKEN_PATH"]
        assert {"readinessProbe", "livenessProbe"} <= set(container)  # KubeRay's own need what the image lacks.
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("name", ["default", "other", "replicas"])
def test_workers_and_the_service_share_a_folder(name: str) -> None:
    objects = objects_of(VALUES[name])
    env = environment(service_container(objects))
    pod = ray_groups(objects)[1]["template"]["spec"]
    service = workload(objects)["spec"]["template"]["spec"]
    claims = []
    for each in (pod, service):
        (mount,) = (m for m in each["containers"][0]["volumeMounts"] if m["mountPath"] == env["ELASTICFLOW_SHARED_DIR"])
        (volume,) = (volume for volume in each["volumes"] if volume["name"] == mount["name"])
        claims.append(volume["persistentVolumeClaim"]["claimName"])
    assert claims[0] == claims[1]
    made = [each for each in objects if each["kind"] == "PersistentVolumeClaim"]
    if name == "other":
        assert (claims[0], made) == ("nfs", [])
    else:
        assert made[0]["metadata"]["name"] == claims[0]
        assert made[0]["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {env["ELASTICFLOW_NODE_FOLDER"], "/dev/shm"} <= mounts


def test_workers_have_what_the_values_say() -> None:
    _, workers = ray_groups(objects_of({}))
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(workers["rayStartParams"]["num-gpus"]) == 1
    objects = objects_of(OTHER)
    _, workers = ray_groups(objects)
    (container,) = workers["template"]["spec"]["containers"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 1, 5)
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    cluster = one(objects, "RayCluster")["spec"]
    assert cluster["rayVersion"] == "2.55.1"
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"


def test_a_pod_that_is_deleted_is_announced_in_time() -> None:
    pod = ray_groups(objects_of({}))[1]["template"]["spec"]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    announced, slept = re.findall(r"(?:--deadline-remaining-seconds=|sleep )(\d+)", hook)
    assert announced == slept
    assert int(slept) < pod["terminationGracePeriodSeconds"]


def test_the_version_of_ray_is_the_images() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f'ARG RAY="ray[client]=={values["ray"]["version"]}"' in DOCKERFILE
    assert f"ray=={values['ray']['version']}" in (ROOT / "requirements/lock.txt").read_text().splitlines()


@pytest.mark.parametrize("name", ["default", "other", "replicas"])
def test_nobody_else_reaches_ray_and_the_agents(name: str) -> None:
    objects = objects_of(VALUES[name])
    policies = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "NetworkPolicy"}
    cluster = one(objects, "RayCluster")["metadata"]["name"]
    labels = workload(objects)["spec"]["template"]["metadata"]["labels"]
    of_ray = {"matchLabels": {"ray.io/cluster": cluster}}
    inside, from_service = policies[f"{cluster}-ray"]["ingress"]
    assert policies[f"{cluster}-ray"]["podSelector"] == of_ray
    assert inside == {"from": [{"podSelector": of_ray}]}
    assert from_service["from"] == [{"podSelector": {"matchLabels": labels}}]
    env = environment(service_container(objects))
    assert {port["port"] for port in from_service["ports"]} == {6379, 10001, int(env["ELASTICFLOW_NODE_PORT"] or 0)}
    (ingress,) = policies[cluster]["ingress"]
    assert policies[cluster]["podSelector"] == {"matchLabels": labels}
    assert ingress["ports"] == [{"port": "http", "protocol": "TCP"}]
    # Only replicas have something to ask each other.
    assert ({"podSelector": {"matchLabels": labels}} in ingress["from"]) is (name == "replicas")
    assert len(ingress["from"]) == (2 if name == "replicas" else 1)


def test_without_peers_nobody_reaches_the_service() -> None:
    objects = objects_of({"networkPolicy": {"from": [], "metricsFrom": []}})
    policy = next(each for each in objects if each["metadata"]["name"] == "elasticflow")
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"]["ingress"] == []
    assert not any(each["kind"] == "NetworkPolicy" for each in objects_of({"networkPolicy": {"enabled": False}}))


def test_evictions_take_one_worker_at_a_time() -> None:
    def budgets(values: dict[str, Any]) -> dict[str, Any]:
        return {
            each["spec"]["selector"]["matchLabels"]["ray.io/node-type"]: each["spec"]["minAvailable"]
            for each in objects_of(values)
            if each["kind"] == "PodDisruptionBudget" and "minAvailable" in each["spec"]
        }

    assert budgets({"ray": {"workers": {"replicas": 4}}}) == {"worker": 3, "head": 1}
    assert budgets({"ray": {"workers": {"replicas": 0}}}) == {"worker": 0, "head": 1}
    assert budgets(OTHER) == {"worker": 2}
    assert budgets({"podDisruptionBudget": {"enabled": False}}) == {}
