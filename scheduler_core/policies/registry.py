"""Policies by name. Each is imported only when it is asked for, so that optional dependencies stay optional."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.policies.port import ServicePolicy
from elasticflow_airflow.scheduler_core.values import Node

Factory = Callable[[SchedulerConfig, Iterable[Node]], ServicePolicy]


def _elasticflow(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.scheduler import Scheduler

    return Scheduler(config, nodes)


def _gang_fifo(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.fifo import GangFifo

    return GangFifo(config, nodes)


def _gang_fifo_knee(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.fifo import GangFifo

    return GangFifo(config, nodes, at_knee=True)


def _edf(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.edf import Edf

    return Edf(config, nodes)


def _edf_plain(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.edf import Edf

    return Edf(config, nodes, plain=True)


def _edf_admission(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.edf import AdmittingEdf

    return AdmittingEdf(config, nodes)


def _edf_elastic(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.edf import ElasticEdf

    return ElasticEdf(config, nodes)


def _optimus(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.optimus import Optimus

    return Optimus(config, nodes)


def _gandiva(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.gandiva import Gandiva

    return Gandiva(config, nodes)


def _tiresias(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.tiresias import Tiresias

    return Tiresias(config, nodes)


def _themis(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.themis import Themis

    return Themis(config, nodes)


def _aonline(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.aonline import AOnline

    return AOnline(config, nodes)


def _oasis(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.oasis import Oasis

    return Oasis(config, nodes)


def _pollux(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.pollux import Pollux

    return Pollux(config, nodes)


def _chronus(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.chronus import Chronus

    return Chronus(config, nodes)


def _chronus_size(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.chronus import Chronus

    return Chronus(config, nodes, choose_size=True)


def _gavel(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.gavel import Gavel

    return Gavel(config, nodes)


def _gavel_plain(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.gavel import Gavel

    return Gavel(config, nodes, at_knee=False)


def _antman(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.antman import AntMan

    return AntMan(config, nodes)


def _antman_plain(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.antman import AntMan

    return AntMan(config, nodes, at_knee=False)


def _elasticflow_types(config: SchedulerConfig, nodes: Iterable[Node]) -> ServicePolicy:
    from elasticflow_airflow.scheduler_core.policies.by_type import ByType

    return ByType(_elasticflow, config, nodes)


_FACTORIES: dict[str, Factory] = {
    "elasticflow": _elasticflow,
    "elasticflow+types": _elasticflow_types,
    "edf": _edf,
    "edf-plain": _edf_plain,
    "edf+elastic": _edf_elastic,
    "edf+admission": _edf_admission,
    "gang-fifo": _gang_fifo,
    "gang-fifo+knee": _gang_fifo_knee,
    "gandiva": _gandiva,
    "tiresias": _tiresias,
    "themis": _themis,
    "chronus": _chronus,
    "chronus+size": _chronus_size,
    "gavel": _gavel,
    "gavel+plain": _gavel_plain,
    "antman": _antman,
    "antman+plain": _antman_plain,
    "optimus": _optimus,
    "pollux": _pollux,
    "oasis": _oasis,
    "aonline": _aonline,
}
DEFAULT_POLICY = "elasticflow"
POLICY_NAMES: tuple[str, ...] = tuple(_FACTORIES)
"""All names that :func:`make_policy` knows, the default first."""


def make_policy(name: str, nodes: Iterable[Node], config: SchedulerConfig | None = None) -> ServicePolicy:
    """A fresh policy over ``nodes``.

    Raises:
        ValueError: there is no policy of this name.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return factory(config or SchedulerConfig(), nodes)
