"""Settings of the service, each from an environment variable ``ELASTICFLOW_<NAME>``. Times are seconds.

Reads the environment and the files that it names; knows nothing about the service's parts.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from elasticflow_airflow.runtime.stores.store import is_remote

if TYPE_CHECKING:
    from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig

SCHEDULER_NAME = "elasticflow"
"""The only scheduler of the service, by its name among the policies of the simulator."""
_REPLICA_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_MAKE_A_KEY = "make one with: python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
_NODE_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _folder_or_url(value: object) -> object:
    """Make a folder absolute, and leave a URL as it is."""
    if value is None or is_remote(str(value)):
        return value
    return str(Path(str(value)).expanduser().absolute())


class ServiceSettings(BaseSettings):
    """All settings. The defaults suit the embedded service of one machine."""

    model_config = SettingsConfigDict(env_prefix="ELASTICFLOW_", extra="ignore", frozen=True, hide_input_in_errors=True)

    state_dir: Path = Field(default_factory=lambda: _default_state_dir())
    host: str | None = None
    """Listen on TCP at this address instead of the Unix socket; needs a token."""
    port: int = Field(default=8321, ge=0, le=65535)
    token: SecretStr | None = None
    token_file: Path | None = None
    metrics_token: SecretStr | None = None
    """Grants access to ``/metrics`` only: for Prometheus, which does not need to submit jobs."""
    metrics_token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    database_url: SecretStr | None = None
    """SQLAlchemy URL; default: SQLite in the state directory."""
    advertise_url: str | None = None
    """``"http://10.0.0.5:8321"``: where the other replicas on this PostgreSQL database reach this one; default: its
    address toward the database, and its port."""
    leader_lease_s: float = Field(default=5.0, ge=1.0, le=120.0)
    """Of several replicas, one decides; when it has been silent for this time, another one takes over."""
    leader_renew_s: float = Field(default=1.0, gt=0)
    """How often the one that decides says so; at most a third of ``leader_lease_s``."""
    secret_key: SecretStr | None = None
    """Fernet keys for the secrets of jobs, separated by commas: the first encrypts, all decrypt. Default: the key in
    the file ``secret.key`` of the state directory, which is made when it is needed."""
    secret_key_file: Path | None = None
    """File with these keys, one in a line."""

    engine: Literal["local", "cluster", "ray", "fake"] = "local"
    """Where workers run: on this machine, on the machines of ``nodes``, or on those of a Ray cluster."""
    nodes: str | None = None
    """``"http://10.0.0.2:8322,http://10.0.0.3:8322"``: the agents of a cluster's machines (``elasticflow node``)."""
    shared_dir: Annotated[str | None, BeforeValidator(_folder_or_url)] = None
    """Folder for checkpoints that this machine and all nodes share, or an fsspec URL; needed for a cluster."""
    node_token: SecretStr | None = None
    """The token that the service and its node agents share; it also encrypts the jobs' secrets on the way."""
    node_token_file: Path | None = None
    node_folder: Path | None = None
    """On each machine of a Ray cluster, the folder of its agent, on a local disk; default: one in /var/tmp."""
    node_notice_file: Path | None = None
    """On each machine of a Ray cluster, the file that announces that the machine goes away, and in how many seconds."""
    node_port: int = Field(default=0, ge=0, le=65535)
    """Where the agents on a Ray cluster listen; 0: any free port."""
    ray_address: str = "auto"
    """The Ray cluster, as ``ray.init`` takes it: ``HOST:PORT`` of its head on a machine of the cluster, or
    ``ray://HOST:10001`` from elsewhere."""
    ray_namespace: str = Field(default="elasticflow", min_length=1, max_length=100)
    """Of the actors in the Ray cluster: services that share one need one each."""
    ray_reserved: bool = False
    """The machines of the Ray cluster are ours alone: workers go on when Ray dies there. Otherwise they end at once,
    since Ray gives their GPUs to others."""
    ray_autoscale_hours: float | None = Field(default=None, gt=0, le=1000)
    """Ray's autoscaler is told how many nodes are wanted, and gets those back that nobody will need for so long ..."""
    ray_unneeded_s: float = Field(default=300.0, gt=0)
    """... nor has needed for so long."""
    ray_allow_insecure: bool = False
    """Use a Ray cluster that lets everybody in who reaches it."""
    suspicion_s: float = Field(default=5.0, ge=2.0)
    """A node that has not answered for this time is given up: its jobs go on without it. Shorter: sooner, but a short
    interruption of the network then costs the node's workers."""
    slots: int | None = Field(default=None, ge=1)
    """CPU slots of this machine; default: its GPUs, or min(cores, 4)."""
    virtual_nodes: str | None = None
    """``"4x2"``: present this machine as 4 nodes of 2 slots."""
    slot_lock_dir: Path | None = None
    """Machine-wide folder of the slot locks; default: one folder per user in the temporary folder."""
    warm_imports: str | None = None
    """``"torch,transformers"``: keep a process that has imported these modules, so that jobs start faster."""

    policy: str = SCHEDULER_NAME
    """The only allowed value. Kept so that deployments that name the scheduler continue to work."""
    objective: Literal["auto", "first-come", "value"] = "auto"
    """Which jobs to admit when not all fit: by arrival, or those worth more than they take from expected arrivals."""

    idle_exit_s: float = Field(default=600.0, gt=0)
    """The embedded service exits after this time without a live job or a request."""
    transition_interval_s: float = Field(default=0.25, gt=0)
    running_interval_s: float = Field(default=1.0, gt=0)
    renew_interval_s: float = Field(default=5.0, gt=0)
    inventory_interval_s: float = Field(default=1.0, gt=0)

    confidence: float = Field(default=0.9, ge=0.5, lt=1)
    """The probability with which a promised deadline is kept, given the uncertainty of speeds not measured yet."""
    throughput_error: float = Field(default=0.10, ge=0, lt=1)
    """Assumed error of the speeds of a task without past runs: the standard deviation, as a fraction.

    Past runs show the real error, and measured speeds need no margin, so this rarely has to be set.
    """
    deadline_margin_s: float = Field(default=2.0, ge=0)
    """Every plan ends this much before its deadline, to allow for delays of the loop and the engine."""
    offer_margin_s: float = Field(default=60.0, ge=0)
    """Added to the earliest feasible deadline that a rejection offers, which is then rounded up to the next minute."""
    default_startup_s: float = Field(default=15.0, ge=0)
    """Assumed until it is measured."""
    default_pause_s: float = Field(default=10.0, ge=0)
    default_in_place_pause_s: float = Field(default=1.0, ge=0)
    """How long training pauses for an in-place change of workers; assumed until it is measured."""
    default_join_s: float = Field(default=15.0, ge=0)
    """How long new workers need until they can join a running training; assumed until it is measured."""
    default_tail_s: float = Field(default=10.0, ge=0)
    wake_up_allowance_s: float = Field(default=5.0, ge=0)
    """Part of the tail: from the promoted checkpoint to the Airflow task that uses it."""

    profile_skip_steps: int = Field(default=2, ge=0)
    """Steps after the start of a gang that do not count towards its speed."""
    profile_steps: int = Field(default=10, ge=1)
    profile_s: float = Field(default=3.0, gt=0)
    """A size is measured after ``profile_steps`` steps that took at least a third of this, or after this time."""
    profile_limit_s: float = Field(default=60.0, gt=0)
    """After this time the steps that were seen have to do."""
    profile_startup_s: float = Field(default=120.0, gt=0)

    explore_gain: float = Field(default=0.35, ge=0, lt=1)
    """The fraction of its remaining time that a running job is assumed to save with an unmeasured size (0: never)."""

    grace_s: float = Field(default=60.0, gt=0)
    """How long workers that are asked to leave may take to save before SIGTERM, and again before SIGKILL."""
    checkpoint_interval_s: float | None = Field(default=None, gt=0)
    """None: chosen from the cost of a save and the failure rate of the job."""
    keep_checkpoints: int = Field(default=2, ge=1)
    max_restarts: int = Field(default=2, ge=0)
    """Restarts after failures of a worker, with progress in between."""
    max_losses: int = Field(default=5, ge=0)
    """Gangs lost with their node or supervisor, without progress in between."""
    hang_min_s: float = Field(default=300.0, gt=0)
    """A job without progress for this time (or 20 times its measured step time, if longer) counts as hung."""
    start_limit_s: float = Field(default=900.0, gt=0)
    """The longest time from the start of a gang to its first step."""
    drain_lead_s: float = Field(default=30.0, ge=0)
    """How long before a node goes away its workers are moved: others have to start elsewhere first."""
    in_place_limit_s: float = Field(default=300.0, gt=0)
    """The longest time for an in-place change of workers; after it, the job is changed by a restart."""
    in_place_attempts: int = Field(default=2, ge=0)
    """After this many failed in-place changes in a row, a job is changed by restarts only (0: always by restarts)."""
    max_recoveries: int = Field(default=3, ge=0)
    """How often the survivors of dead workers may continue from memory ..."""
    recovery_window_s: float = Field(default=600.0, gt=0)
    """... within this time; beyond that, the job is restarted from its last checkpoint."""
    heartbeat_limit_s: float = Field(default=30.0, gt=0)
    """A worker that others wait for is given up after this time without a heartbeat."""
    straggler_removal: bool = True
    """Whether gangs leave slots on which one of their workers is persistently slow."""
    straggler_windows: int = Field(default=3, ge=1)
    """The number of measurements in a row (about one every 5 s) that must show a worker to be slow ..."""
    straggler_excess: float = Field(default=0.25, gt=0)
    """... that is, slower than the median of the others by this fraction of it."""
    straggler_avoid_s: float = Field(default=600.0, gt=0)
    """How long nothing is planned on a slot that was left because of a slow worker."""
    keep_days: float = Field(default=90.0, gt=0)
    """How long events, samples, generations, logs and reports of ended jobs are kept; ``inf``: forever.

    The jobs themselves are kept, with their results and checkpoints.
    """
    tail_limit_s: float = Field(default=3600.0, gt=0)
    """How long a script may continue after its last step, for example to evaluate."""
    apply_attempts: int = Field(default=3, ge=1)
    """A job fails when the engine has refused to start its gang this many times in a row ..."""
    apply_limit_s: float = Field(default=10.0, ge=0)
    """... and for this time, with the engine's message. (Slots may take a moment to become free.)"""

    snapshot_max_bytes: int = Field(default=64 * 2**20, ge=1)
    snapshot_max_files: int = Field(default=4000, ge=1)
    verdict_wait_s: float = Field(default=10.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator(
        "state_dir",
        "token_file",
        "metrics_token_file",
        "secret_key_file",
        "slot_lock_dir",
        "node_token_file",
        "node_folder",
        "node_notice_file",
    )
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("virtual_nodes")
    @classmethod
    def _nodes_by_slots(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", value):
            raise ValueError(f'virtual_nodes={value!r}: write nodes x slots, such as "4x2"')
        return value

    @field_validator("nodes")
    @classmethod
    def _urls(cls, value: str | None) -> str | None:
        wrong = [url for url in _listed(value) if not _NODE_URL.fullmatch(url)]
        if wrong:
            raise ValueError(f'{wrong[0]!r} is no address of a node; write "http://HOST:PORT", separated by commas')
        twice = [url for url in _listed(value) if _listed(value).count(url) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice")
        return value

    @field_validator("advertise_url")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        if value is not None and not _REPLICA_URL.fullmatch(value):
            raise ValueError(f'{value!r} is no address of a replica; write "http://HOST:PORT" or "https://HOST:PORT"')
        return value

    @model_validator(mode="after")
    def _lease_that_holds(self) -> ServiceSettings:
        from elasticflow_airflow.service.leadership.lease import LeaseTerms

        LeaseTerms(self.leader_lease_s, self.leader_renew_s)
        return self

    @field_validator("secret_key")
    @classmethod
    def _fernet_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and value.get_secret_value():
            _checked_keys(value.get_secret_value().split(","))
        return value

    @field_validator("policy")
    @classmethod
    def _served_policy(cls, value: str) -> str:
        if value != SCHEDULER_NAME:
            raise ValueError(
                f"{value!r} cannot be served: the service has one scheduler, {SCHEDULER_NAME!r}; leave the setting out,"
                " and play other policies with `elasticflow simulate --policy NAME`"
            )
        return value

    @field_validator("warm_imports")
    @classmethod
    def _modules(cls, value: str | None) -> str | None:
        names = [name.strip() for name in (value or "").split(",")]
        wrong = [name for name in names if name and not _MODULE.fullmatch(name)]
        if wrong:
            raise ValueError(f'warm_imports: {wrong[0]!r} is no module name; write names such as "torch,transformers"')
        return value

    def scheduler_config(self) -> SchedulerConfig:
        """Return the scheduler's configuration, as far as it is set here."""
        from elasticflow_airflow.scheduler_core.model.config import Objective, SchedulerConfig

        return SchedulerConfig.served(
            objective=Objective(self.objective),
            speed_sigma=self.throughput_error,
            speed_confidence=self.confidence,
            deadline_margin_s=self.deadline_margin_s,
            offer_margin_s=self.offer_margin_s,
            profile_budget_s=self.profile_limit_s,
            profile_startup_s=self.profile_startup_s,
            explore_gain=self.explore_gain,
            starts_reported=True,
        )

    def warm_modules(self) -> tuple[str, ...] | None:
        """Return the modules that the warm pool imports; None if there is no warm pool."""
        names = tuple(name.strip() for name in (self.warm_imports or "").split(",") if name.strip())
        return names or None

    def node_urls(self) -> list[str]:
        """Return the addresses of the node agents."""
        return _listed(self.nodes)

    def read_node_token(self) -> str | None:
        """Return the token of the node agents. Raises ValueError when its file holds none."""
        return _token(self.node_token, self.node_token_file)

    def node_shape(self) -> tuple[int, int] | None:
        """Return (nodes, slots per node) from ``virtual_nodes``, or None."""
        if self.virtual_nodes is None:
            return None
        nodes, slots = self.virtual_nodes.split("x")
        return int(nodes), int(slots)

    def read_token(self) -> str | None:
        """Return the bearer token, from the environment or its file. Raises ValueError when the file holds none."""
        return _token(self.token, self.token_file)

    def read_metrics_token(self) -> str | None:
        """Return the token that grants access to ``/metrics`` only. Raises ValueError when its file holds none."""
        return _token(self.metrics_token, self.metrics_token_file)

    @property
    def is_shared(self) -> bool:
        """Whether several services may use the database."""
        return self.store_url().startswith("postgresql")

    def read_secret_keys(self) -> tuple[str, ...]:
        """Return the keys that secrets are encrypted with, from the environment or their file; empty if none is set.

        The first encrypts, all decrypt. Raises ValueError when the file cannot be read, or does not hold keys only.
        """
        if self.secret_key is not None and self.secret_key.get_secret_value():
            return _checked_keys(self.secret_key.get_secret_value().split(","))
        if self.secret_key_file is None:
            return ()
        try:
            lines = self.secret_key_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file of secret keys {self.secret_key_file} cannot be read: {error}") from error
        return _checked_keys(lines, f"the file of secret keys {self.secret_key_file}: ")

    def store_url(self) -> str:
        """Return the SQLAlchemy URL of the store."""
        if self.database_url is None:
            return f"sqlite:///{self.state_dir / 'elasticflow.db'}"
        url = self.database_url.get_secret_value()
        if url.startswith(("postgres://", "postgresql://")):
            return "postgresql+psycopg://" + url.split("://", 1)[1]
        return url


def problems_of(error: ValidationError) -> list[str]:
    """Return one sentence per invalid setting, with the name of its environment variable."""
    sentences = []
    for item in error.errors():
        name = "_".join(str(part) for part in item["loc"]).upper()
        sentences.append(f"ELASTICFLOW_{name}: {item['msg'].removeprefix('Value error, ')}")
    return sentences


def _token(given: SecretStr | None, file: Path | None) -> str | None:
    if given is not None and given.get_secret_value():
        return given.get_secret_value()
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(f"the token file {file} cannot be read: {error}") from error
    if not token:
        raise ValueError(f"the token file {file} is empty: write a long random text into it")
    return token


def is_fernet_key(text: str | bytes) -> bool:
    """Return whether this is a Fernet key: 32 bytes in URL-safe base64."""
    try:
        return len(base64.urlsafe_b64decode(text)) == 32
    except ValueError:  # No base64, or letters that are not of ASCII.
        return False


def _checked_keys(words: Sequence[str], where: str = "") -> tuple[str, ...]:
    """Return the keys. Raises ValueError, which never shows one, when there is none, or anything else beside them."""
    keys = tuple(word.strip() for word in words if word.strip())
    for number, key in enumerate(keys, start=1):
        if not is_fernet_key(key):
            raise ValueError(f"{where}key {number} of {len(keys)} is no Fernet key: {_MAKE_A_KEY}")
    if not keys:
        raise ValueError(f"{where}there is no key: {_MAKE_A_KEY}")
    return keys


def _listed(text: str | None) -> list[str]:
    return [word.strip().rstrip("/") for word in (text or "").split(",") if word.strip()]


def _default_state_dir() -> Path:
    home = os.environ.get("AIRFLOW_HOME")
    return Path(home) / "elasticflow" if home else Path.home() / ".elasticflow"
