"""Which device a worker takes, and the settings under which its arithmetic repeats. CUDA is played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elasticflow_airflow.runtime.stepping.devices import make_repeatable, pick_device, what_may_not_repeat

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs; which were made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic, torch.get_deterministic_debug_mode()
    yield
    cudnn.benchmark, cudnn.deterministic = before[:2]
    torch.set_deterministic_debug_mode(before[2])


@pytest.mark.parametrize(("local_rank", "index"), [(None, 0), ("0", 0), ("1", 1), ("2", 0), ("3", 1)])
def test_workers_of_torchrun_share_the_gpus_out(gpus: list[torch.device], local_rank: str | None, index: int) -> None:
    environ = {} if local_rank is None else {"LOCAL_RANK": local_rank}
    assert pick_device(environ) == torch.device("cuda", index)
    assert gpus == [torch.device("cuda", index)]


def test_without_gpus_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert pick_device(hidden) == torch.device("cpu")


def test_a_gpu_that_was_given_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"CUDA_VISIBLE_DEVICES=GPU-1.*built without CUDA"):
        pick_device({"CUDA_VISIBLE_DEVICES": "GPU-1"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="nvidia-smi"):
        pick_device({"CUDA_VISIBLE_DEVICES": "MIG-1"})


def test_arithmetic_on_a_gpu_is_made_to_repeat() -> None:
    torch.backends.cudnn.benchmark = True
    environ: dict[str, str] = {}
    assert len(what_may_not_repeat(GPU, environ)) == 3
    make_repeatable(GPU, environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    assert torch.backends.cudnn.deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert what_may_not_repeat(GPU, environ) == []


def test_what_a_script_has_asked_for_stays() -> None:
    torch.set_deterministic_debug_mode("error")
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    make_repeatable(GPU, environ)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    torch.backends.cudnn.benchmark = True
    (warning,) = what_may_not_repeat(GPU, environ)
    assert "benchmark" in warning


def test_on_a_cpu_nothing_changes() -> None:
    environ: dict[str, str] = {}
    make_repeatable(torch.device("cpu"), environ)
    assert environ == {}
    assert not torch.are_deterministic_algorithms_enabled()
    assert what_may_not_repeat(torch.device("cpu"), environ) == []
