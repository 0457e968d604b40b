"""On a GPU, too, the weights do not depend on the number of workers, bit for bit."""

from __future__ import annotations

import pytest

from elasticflow_airflow.runtime.protocol import ReportKind

pytestmark = pytest.mark.gpu

MODELS = ["convolution", "bert", "bfloat16", "float16"]


@pytest.mark.parametrize("model", MODELS)
def test_one_worker_trains_the_same_bits_twice(train, model: str) -> None:
    if model == "bert":
        pytest.importorskip("transformers")
    assert train(1, model) == train(1, model)


@pytest.mark.parametrize("model", MODELS)
def test_two_workers_train_the_same_bits_as_one(train, model: str) -> None:
    if model == "bert":
        pytest.importorskip("transformers")
    assert train(2, model) == train(1, model)


def test_four_workers_train_the_same_bits_as_one(train) -> None:
    assert train(4) == train(1)


def test_it_is_the_gpu_that_trains(gpu_gang) -> None:
    gang = gpu_gang(epochs=2)
    gang.plan("w0")
    assert gang.finish() == {"w0": 0}, gang.story()
    assert any(report.data["device_memory_bytes"] > 0 for report in gang.reports(ReportKind.PROGRESS)), gang.story()


def test_workers_that_share_a_gpu_say_that_they_go_through_the_host(gpu_gang) -> None:
    gang = gpu_gang(epochs=2)
    gang.plan("w0", "w1")
    assert set(gang.finish().values()) == {0}, gang.story()
    assert sum("share a GPU, which NCCL refuses" in line for line in gang.output()) == 1
