"""Models whose gradients cannot be summed over workers are refused by name, with a way out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticflow_airflow.runtime.stepping.reduction import refuse_optimizer, refuse_unsupported


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sync_batch_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_statistics_over_all_workers_are_refused_where_their_number_must_not_matter():
    with pytest.raises(TypeError, match=r"the model's 1 \(SyncBatchNorm\) takes statistics over all .*: use BatchNorm"):
        refuse_unsupported(sync_batch_norm(), consistent=True)
    refuse_unsupported(sync_batch_norm(), consistent=False)


def test_a_parameter_without_a_shape():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"parameter 0.weight has no shape yet: run one batch through the model"):
        refuse_unsupported(model, consistent=True)
    model(torch.ones(1, 2))
    refuse_unsupported(model, consistent=True)


def test_several_models_and_several_optimizers_are_told_how_to_be_one():
    parts = [nn.Linear(2, 2), nn.Linear(2, 1)]
    with pytest.raises(TypeError, match=r"model= is a list: register one nn.Module; several are one as nn.ModuleList"):
        refuse_unsupported(parts, consistent=True)
    refuse_unsupported(nn.ModuleList(parts), consistent=True)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    with pytest.raises(TypeError, match="optimizer= is a list: register each by a name of its own"):
        refuse_optimizer("optimizer", optimizers)
    refuse_optimizer("optimizer", optimizers[0])


def test_an_optimizer_that_computes_the_loss_itself():
    with pytest.raises(TypeError, match=r"LBFGS computes the loss several times in a step.*AdamW or SGD"):
        refuse_optimizer("optimizer", torch.optim.LBFGS(nn.Linear(2, 2).parameters()))


def test_sparse_gradients():
    with pytest.raises(TypeError, match=r"a model of type Embedding has sparse gradients.*leave sparse=True out"):
        refuse_unsupported(nn.Embedding(4, 2, sparse=True), consistent=False)


@pytest.mark.usefixtures("world_of_one")
def test_a_model_that_sums_by_itself():
    model = nn.ModuleDict({"inner": DistributedDataParallel(nn.Linear(2, 2))})
    with pytest.raises(TypeError, match=r"the model's inner \(DistributedDataParallel\) sums .*: register the model"):
        refuse_unsupported(model, consistent=True)


@pytest.mark.usefixtures("world_of_one")
def test_a_model_in_pieces():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 2, bias=False)
    weight = distribute_tensor(model.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)])
    model.weight = nn.Parameter(weight)
    with pytest.raises(TypeError, match=r"parameter weight is sharded \(DTensor\): the session needs the whole model"):
        refuse_unsupported(model, consistent=True)
