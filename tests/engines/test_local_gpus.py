"""Which GPUs a machine has, as the driver tells it, and what a worker sees of them. A driver is played."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticflow_airflow.engines.local.inherited_variables import worker_environment
from elasticflow_airflow.engines.local.machine import gpus, layout
from elasticflow_airflow.engines.local.machine.gpus import Card, Gpu, choose_visible, visible_gpus
from elasticflow_airflow.engines.local.machine.layout import NodeLayout, detect_nodes
from elasticflow_airflow.engines.local.node_manager import NodeManager
from elasticflow_airflow.scheduler_core.model.values import Slot

A, B, C = Gpu("GPU-aa11", "H"), Gpu("GPU-aa22", "H"), Gpu("GPU-cc33", "H")
PARTS = (Gpu("MIG-11", "H MIG 1g.5gb"), Gpu("MIG-12", "H MIG 1g.5gb"))
WHOLE = (Card(A), Card(B), Card(C))
DIVIDED = (Card(A), Card(B, PARTS))


def chosen(cards: tuple[Card, ...], wanted: str | None) -> list[str]:
    return [gpu.uuid for gpu in choose_visible(cards, {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, ["GPU-aa11", "GPU-aa22", "GPU-cc33"]),
        ("", []),
        ("2,0", ["GPU-cc33", "GPU-aa11"]),
        (" 1 , 2 ", ["GPU-aa22", "GPU-cc33"]),
        ("0,7,1", ["GPU-aa11"]),
        ("-1", []),
        ("1,-1,0", ["GPU-aa22"]),
        ("NoDevFiles", []),
        ("GPU-cc33,GPU-aa2", ["GPU-cc33", "GPU-aa22"]),
        ("GPU-aa", []),
        ("GPU-cc33,GPU-aa,GPU-aa11", ["GPU-cc33"]),
        ("1,1", []),
        ("GPU-aa11,GPU-aa1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(wanted: str | None, expected: list[str]) -> None:
    assert chosen(WHOLE, wanted) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, ["GPU-aa11", "MIG-11", "MIG-12"]),
        ("1", ["MIG-11", "MIG-12"]),
        ("GPU-aa2", ["MIG-11", "MIG-12"]),
        ("MIG-12", ["MIG-12"]),
        ("MIG-12,0", ["MIG-12", "GPU-aa11"]),
        ("MIG-1", []),
        ("MIG-12,1", []),
    ],
)
def test_a_divided_gpu_is_its_instances(wanted: str | None, expected: list[str]) -> None:
    assert chosen(DIVIDED, wanted) == expected


def test_numbers_must_say_which_gpus_are_meant() -> None:
    mixed = (Card(A), Card(Gpu("GPU-old", "K")))
    with pytest.raises(ValueError, match="nvidia-smi -L"):
        chosen(mixed, "0")
    assert chosen(mixed, "1,0") == ["GPU-old", "GPU-aa11"]  # all of them, however they are counted
    assert chosen(mixed, "GPU-old") == ["GPU-old"]
    assert choose_visible(mixed, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (mixed[1].gpu,)


class Driver:
    """Plays libnvidia-ml: ``cards`` as lists of (uuid, model), the first of each the GPU, the others its instances."""

    def __init__(self, cards: list[list[tuple[str, str]]], status: int = 0) -> None:
        self._cards, self._status = cards, status
        self._all = [device for card in cards for device in card]

    def _handle(self, device: tuple[str, str], into: Any) -> int:
        into._obj.value = self._all.index(device) + 1
        return 0

    def _device(self, handle: ctypes.c_void_p) -> tuple[str, str]:
        return self._all[(handle.value or 0) - 1]

    def nvmlInit_v2(self) -> int:
        return self._status

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, into: Any) -> int:
        into._obj.value = len(self._cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, into: Any) -> int:
        return self._handle(self._cards[index][0], into) if self._cards[index] else 15

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, into: Any, size: int) -> int:
        into.value = self._device(handle)[0].encode()
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, into: Any, size: int) -> int:
        into.value = self._device(handle)[1].encode()
        return 0


class DividingDriver(Driver):
    """One that knows of MIG; every GPU has room for three instances."""

    def _card(self, handle: ctypes.c_void_p) -> list[tuple[str, str]]:
        return next(card for card in self._cards if card and card[0] == self._device(handle))

    def nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p, now: Any, pending: Any) -> int:
        now._obj.value = int(len(self._card(handle)) > 1)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: ctypes.c_void_p, into: Any) -> int:
        into._obj.value = 3
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: ctypes.c_void_p, index: int, into: Any) -> int:
        instances = self._card(handle)[1:]
        return self._handle(instances[index], into) if index < len(instances) else 6


def played(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: driver)


def test_a_driver_that_knows_of_no_instances_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, Driver([[("GPU-1", "Old")], [("GPU-2", "Old")]]))
    assert visible_gpus({}) == (Gpu("GPU-1", "Old"), Gpu("GPU-2", "Old"))


def test_instances_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, DividingDriver([[("GPU-1", "H")], [("GPU-2", "H"), ("MIG-a", "H 1g"), ("MIG-b", "H 1g")]]))
    assert [gpu.uuid for gpu in visible_gpus({})] == ["GPU-1", "MIG-a", "MIG-b"]


def test_a_gpu_that_is_broken_keeps_its_number(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    played(monkeypatch, DividingDriver([[], [("GPU-2", "H")]]))
    assert [gpu.uuid for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "1"})] == ["GPU-2"]
    assert "GPU 0 cannot be used" in caplog.text


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    played(monkeypatch, Driver([[("GPU-1", "H")]], status=9))
    assert visible_gpus({}) == ()
    assert caplog.text == ""
    played(monkeypatch, Driver([[("GPU-1", "H")]], status=18))
    assert visible_gpus({}) == ()
    assert "NVML status 18" in caplog.text


def test_gpus_of_one_model_are_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(layout, "visible_gpus", lambda environ: (Gpu("GPU-s", "Screen"), A, B))
    (node,) = detect_nodes(environ={})
    assert (node.device, node.device_type) == ("cuda", "H")
    assert [slot.gpu for slot in node.slots] == ["GPU-aa11", "GPU-aa22"]
    assert "left out: Screen" in caplog.text
    with pytest.raises(ValueError, match="different models"):
        detect_nodes(environ={"CUDA_VISIBLE_DEVICES": "GPU-s,GPU-aa11"})


def gpu_nodes(monkeypatch: pytest.MonkeyPatch, *found: Gpu) -> tuple[NodeLayout, ...]:
    monkeypatch.setattr(layout, "visible_gpus", lambda environ: found)
    return detect_nodes(environ={})


def worker_envs(tmp_path: Path, nodes: tuple[NodeLayout, ...], env: dict[str, str]) -> list[dict[str, str]]:
    """What each of the workers of a gang over all slots is given."""
    manager = NodeManager(tmp_path, nodes, tmp_path / "locks", {"CUBLAS_LOGINFO_DBG": "1"})
    facts = manager.facts("local")
    return [facts.slot_env(Slot("local", index), env) for index in range(len(nodes[0].slots))]


def test_a_worker_sees_the_gpu_of_its_slot_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = worker_envs(tmp_path, gpu_nodes(monkeypatch, A, *PARTS)[:1], {})
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("MIG-11", "MIG-12")
    assert first["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert first["NCCL_SOCKET_IFNAME"] == "lo"
    (own,) = worker_envs(tmp_path, gpu_nodes(monkeypatch, A), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert own["CUDA_VISIBLE_DEVICES"] == "GPU-aa11"
    assert "CUBLAS_WORKSPACE_CONFIG" not in own  # the job's own comes beside it


def test_workers_meet_at_the_address_of_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (node,) = gpu_nodes(monkeypatch, A)
    node = replace(node, address="10.0.0.7", interface="eth1")
    (env,) = worker_envs(tmp_path, (node,), {})
    assert env["ELASTICFLOW_ADDRESS"] == "10.0.0.7"
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth1")
    (env,) = worker_envs(tmp_path, (node,), {"GLOO_SOCKET_IFNAME": "ib0"})
    assert "GLOO_SOCKET_IFNAME" not in env  # the job's own comes beside it


def test_a_worker_without_a_gpu_sees_none(tmp_path: Path) -> None:
    (env,) = worker_envs(tmp_path, detect_nodes(slots=1, environ={"CUDA_VISIBLE_DEVICES": ""}), {})
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUBLAS_WORKSPACE_CONFIG" not in env


def test_names_of_older_drivers_make_files(monkeypatch: pytest.MonkeyPatch) -> None:
    (node,) = gpu_nodes(monkeypatch, Gpu("MIG-GPU-1/3/0", "H MIG"))
    assert node.slots[0].lock_name == "gpu-MIG-GPU-1-3-0"
    assert node.slots[0].gpu == "MIG-GPU-1/3/0"


def test_what_the_service_says_of_cuda_reaches_the_workers() -> None:
    environ = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "0", "CUBLAS_A": "1", "CUDA_VISIBLE_DEVICES": "3"}
    env = worker_environment(environ, {}, "/bridge")
    assert {"NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "CUBLAS_A"} <= set(env)
    assert "CUDA_VISIBLE_DEVICES" not in env
