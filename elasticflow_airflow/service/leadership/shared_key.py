"""Makes sure that all services on one database can read each other's secrets: they have a key in common.

The database holds the id of the key that encrypts, never a key.
"""

from __future__ import annotations

from typing import Protocol

import sqlalchemy as sa
import structlog

from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import IncarnationRow, LeaderRow, ReplicaRow

log = structlog.get_logger(__name__)

_THERE_S = 60.0
"""A replica that was heard of within this time is taken to be there."""


class Keys(Protocol):
    """The keys of this service by their ids (see ``SecretBox``)."""

    @property
    def key_ids(self) -> tuple[str, ...]:
        """All of them, that which encrypts first."""
        ...


class OtherKeyError(Exception):
    """Services on this database encrypt with a key that this one does not have; the message says what to do."""


def agree_on_key(store: Store, keys: Keys) -> None:
    """Note the key that this service encrypts with, which all services on the database must have.

    Called at the start by every service on a database that several may use, and again when it has said that it is
    there. Another key is replaced if this service has it, too: that is a rotation. Raises OtherKeyError if it does not,
    and what reading the keys raises.
    """
    ours = keys.key_ids
    known = sa.or_(LeaderRow.key_id.is_(None), LeaderRow.key_id.in_(ours))
    # One statement: of two services that start at once, the second sees what the first has noted.
    note = sa.update(LeaderRow).where(LeaderRow.id == 1, known).values(key_id=ours[0])
    with store.engine_without_transactions.connect() as connection:
        if connection.execute(note).rowcount:
            return
        theirs = connection.scalar(sa.select(LeaderRow.key_id).where(LeaderRow.id == 1))
    raise OtherKeyError(
        f"the secrets of jobs in this database are encrypted with the key {theirs}, which this service does not have:"
        f" it has {', '.join(ours)}. Give all services on the database the same keys, by ELASTICFLOW_SECRET_KEY or"
        " ELASTICFLOW_SECRET_KEY_FILE (one may be in the file secret.key of another service's state directory). If the"
        " key is lost, set key_id in the table leader to NULL: jobs whose secrets were encrypted with it cannot start"
        " again"
    )


def forget_lost_key(store: Store, keys: Keys) -> None:
    """Forget a key that this service does not have, if nobody is there who has it, and nothing that is needed has it.

    As when the folder of the only service was lost, with its key in it. Called before :func:`agree_on_key`.
    """
    needed = sa.exists().where(IncarnationRow.secret_env.is_not(None), IncarnationRow.terminal.is_(False))
    others = sa.exists().where(ReplicaRow.seen_at > store.clock() - _THERE_S)
    forget = (
        sa.update(LeaderRow)
        .where(LeaderRow.id == 1, LeaderRow.key_id.not_in(keys.key_ids), sa.not_(needed), sa.not_(others))
        .values(key_id=None)
    )
    with store.engine_without_transactions.connect() as connection:
        if connection.execute(forget).rowcount:
            log.warning("the key of secrets in this database was lost with a service that is gone: another is used")
