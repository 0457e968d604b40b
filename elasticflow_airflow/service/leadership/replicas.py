"""Who is there: each replica says so in the database, and answers what its role is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from elasticflow_airflow.api import LeaderStatus, ReplicaStatus
from elasticflow_airflow.service.leadership.leadership import Leadership
from elasticflow_airflow.service.leadership.lease_table import LeaderView
from elasticflow_airflow.service.store.tables import ReplicaRow

SAY_EVERY_S = 5.0
_GONE_S = 4 * SAY_EVERY_S
_FORGOTTEN_S = 3600.0
_WRONG_CLOCK_S = 5.0
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_SAY = sa.text(
    f"""INSERT INTO replica (replica_id, url, card, seen_at) VALUES (:replica_id, :url, CAST(:card AS json), {_NOW})
    ON CONFLICT (replica_id) DO UPDATE SET url = EXCLUDED.url, card = EXCLUDED.card, seen_at = EXCLUDED.seen_at
    RETURNING seen_at"""  # noqa: S608  (constants only)
)


@dataclass(slots=True)
class Replicas:
    """The replica of this process among the others. ``clock`` returns UTC seconds."""

    leadership: Leadership
    replica_id: str
    url: str | None
    card: Mapping[str, Any]
    engine: sa.Engine
    """Each statement is its own transaction."""
    clock: Callable[[], float]
    clock_offset_s: float = 0.0
    """This machine's clock minus that of the database, as of the last time that this replica said that it is there."""

    @property
    def role(self) -> Literal["leader", "follower"]:
        """Whether this replica may decide now."""
        return "leader" if self.leadership.lease.may_decide() else "follower"

    @property
    def view(self) -> LeaderView | None:
        """What the row of the lease said last."""
        return self.leadership.view

    @property
    def leader_url(self) -> str | None:
        """Where the leader is reached, if there is another one than this."""
        view = self.leadership.view
        if view is None or view.holder in (None, self.replica_id):
            return None
        return view.url

    def problems(self) -> list[str]:
        """Return what keeps this replica from its part; sentences for people."""
        found = [self.leadership.problem] if self.leadership.problem else []
        view = self.view
        if view is not None and not view.is_held:
            found.append("no replica decides at this moment: jobs go on, and new ones wait for their verdict")
        if abs(self.clock_offset_s) > _WRONG_CLOCK_S:
            way = "ahead of" if self.clock_offset_s > 0 else "behind"
            found.append(
                f"the clock of {self.card.get('host', 'this machine')} is {abs(self.clock_offset_s):.0f} s {way} that"
                " of the database: set both by a time server, or deadlines shift when another replica decides"
            )
        return found

    def say(self) -> None:
        """Say in the database that this replica is there. Raises what the driver raises."""
        about = {"replica_id": self.replica_id, "url": self.url, "card": json.dumps(dict(self.card))}
        with self.engine.connect() as connection:
            before = self.clock()
            now_there = connection.execute(_SAY, about).scalar_one()
            after = self.clock()
            # Anything between both is possible: only what is certain counts.
            self.clock_offset_s = before - now_there if before > now_there else min(0.0, after - now_there)
            connection.execute(sa.delete(ReplicaRow).where(ReplicaRow.seen_at < sa.text(f"{_NOW} - {_FORGOTTEN_S}")))

    def leave(self) -> None:
        """Have this replica forgotten. Raises what the driver raises."""
        with self.engine.connect() as connection:
            connection.execute(sa.delete(ReplicaRow).where(ReplicaRow.replica_id == self.replica_id))

    def status(self) -> LeaderStatus | None:
        """Return who decides, and who else is there; None before that is known. Raises what the driver raises."""
        view = self.view
        if view is None:
            return None
        return LeaderStatus(
            epoch=view.epoch,
            leader=view.holder if view.is_held else None,
            elected_at=view.elected_at,
            change=view.change,
            failed_over_at=view.failed_over_at,
            replicas=self.everybody(),
        )

    def everybody(self) -> list[ReplicaStatus]:
        """Return all replicas that were heard of lately. Raises what the driver raises."""
        holder = None if self.view is None else self.view.holder
        with self.engine.connect() as connection:
            rows = connection.execute(
                sa.select(
                    ReplicaRow.replica_id, ReplicaRow.url, ReplicaRow.card, sa.text(f"{_NOW} - seen_at AS silent_s")
                ).order_by(ReplicaRow.replica_id)
            ).all()
        return [
            ReplicaStatus(
                replica_id=replica_id,
                role="leader" if replica_id == holder else "follower",
                url=url,
                host=str((card or {}).get("host", "")),
                version=str((card or {}).get("version", "")),
                silent_s=max(0.0, silent_s),
                is_gone=silent_s > _GONE_S,
            )
            for replica_id, url, card, silent_s in rows
        ]
