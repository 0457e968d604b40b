"""Handles requests about jobs: submit or attach, amend, cancel, acknowledge, renew. The rules of identity and claim.

Runs in the threads of HTTP handlers: writes the desired state into the store, wakes the loop, and reads its answers. A
request that waits for an answer holds no thread (``job_routes``). Calls neither the scheduler nor the engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from elasticflow_airflow import bounds
from elasticflow_airflow.api import (
    AmendRequest,
    Attachment,
    EventKind,
    JobStatus,
    JobSubmission,
    State,
)
from elasticflow_airflow.api.event_data import AmendedData
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.job_files.snapshots import SnapshotLostError, Snapshots
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.refusal import Refusal, never_fits, no_such_job, stale_claim, wrong_job_id
from elasticflow_airflow.service.renewals import Question, Renewals
from elasticflow_airflow.service.requests.next_attempt import answer_for_next_attempt, has_ended_badly, take_terms
from elasticflow_airflow.service.requests.same_training import is_attachable, is_resumable
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.store import Current, Reader, Store, Writer
from elasticflow_airflow.service.store.tables import AmendmentRow, AvoidedSlotRow, DrainRow, IncarnationRow, JobRow
from elasticflow_airflow.service.store.views import status_of
from elasticflow_airflow.times import moment

_SETTINGS = ("python", "requirements", "working_dir", "env")
"""Of a command: they change the training, but not which training it is."""
_NAMED_FILES = 10
_KEYS = 4
"""So many submissions of a job are known again when they come a second time."""


class Submitted(NamedTuple):
    """The result of a submit; ``amendment_id`` is set if it asks for another deadline or value of a live job."""

    job_id: str
    incarnation: int
    claim: int
    created: bool
    warnings: tuple[str, ...]
    amendment_id: int | None

    def attachment(self, status: JobStatus, answer: AmendmentAnswer | None) -> Attachment:
        """Return the answer to the client; ``answer`` is the loop's answer to the amendment, if there is one yet."""
        warnings = [*self.warnings]
        if answer is not None and not answer.accepted:
            held = "the changed deadline or value is not promised, and what held before holds on"
            warnings.append(f"{held}: {answer.reason}")
        return Attachment(job=status, claim=self.claim, created=self.created, warnings=warnings)


@dataclass(frozen=True, slots=True)
class JobService:
    """Handles every call about jobs.

    ``slots`` returns the total number of slots, 0 if unknown; ``has_files`` whether an incarnation of a job has files.
    ``hears_renewals``: whether whoever decides sees ``renewals``; otherwise they are also written, though not each.
    """

    store: Store
    notifier: Notifier
    snapshots: Snapshots
    secrets: SecretBox
    settings: ServiceSettings
    has_files: Callable[[str, int], bool]
    slots: Callable[[], int]
    clock: Callable[[], float]
    renewals: Renewals = field(default_factory=Renewals)
    """Tells the loop which jobs were asked for."""
    hears_renewals: Callable[[], bool] = lambda: True

    def submit(self, job_id: str, submission: JobSubmission, key: str | None = None) -> Submitted:
        """Attach to an equal job that is live or not acknowledged yet, or open a new incarnation.

        ``key``: of this submission; one that has come before changes nothing, however late it comes again.
        Raises Refusal for a wrong id, code that was not uploaded, or sizes that never fit.
        """
        self._check(job_id, submission)
        sealed = self.secrets.seal({name: value.get_secret_value() for name, value in submission.secret_env.items()})
        with self.store.write() as tx:
            job = tx.job(job_id)
            before = None if job is None or key is None else _claim_of(job, key)
            if before is not None:
                return Submitted(job_id, before[1], before[0], created=False, warnings=(), amendment_id=None)
            row = tx.incarnation(job_id, job.incarnation) if job is not None and job.incarnation else None
            asked = None if row is None else readable(row.submission)
            if job is not None and row is not None and asked is not None and is_attachable(row, asked, submission):
                created, (warnings, amendment_id) = False, self._attach(tx, row, asked, submission)
                replaced = None if row.terminal else asked.command.snapshot
            else:
                job = job or self._new_job(tx, job_id, submission)
                self._supersede(row)
                resumes = row is not None and asked is not None and is_resumable(row, asked, submission)
                row = self._open(tx, job, row if resumes else None, submission, sealed)
                created, warnings, amendment_id, replaced = True, take_terms(tx, row, self.clock()), None, None
            job.claim = _next(job.claim)
            claim, incarnation = job.claim, row.incarnation
            if key is not None:
                job.claimed_by = [*(job.claimed_by or ())[-_KEYS + 1 :], [key, claim, incarnation]]
        self.notifier.wake()
        if replaced is not None:  # After the transaction: the files of both are read, and may have to be fetched.
            warnings = [*self._warn_of_changed_code(replaced, submission.command.snapshot), *warnings]
        return Submitted(job_id, incarnation, claim, created, tuple(warnings), amendment_id)

    def decided(self, wanted: Collection[tuple[str, int]]) -> dict[tuple[str, int], bool]:
        """Return those of these incarnations that the loop has decided on, or that are terminal."""
        with self.store.read() as reader:
            return dict.fromkeys(reader.decided(wanted), True)

    def attach(self, job_id: str, lease_s: float | None) -> Attachment:
        """Take a new claim on the current incarnation. Raises Refusal 404."""
        with self.store.write() as tx:
            job, row = _current(tx, job_id)
            job.claim = _next(job.claim)
            row.renewals, row.heard_at = _next(row.renewals), self.clock()
            row.lease_s = lease_s if lease_s is not None else row.lease_s
            claim = job.claim
        self.notifier.wake()
        return Attachment(job=self.status(job_id), claim=claim, created=False)

    def status(self, job_id: str) -> JobStatus:
        """Return the status of a job. Raises Refusal 404."""
        (answer,) = self.statuses([job_id])
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus | Refusal]:
        """Return the statuses of several jobs, from one query, in the same order; a Refusal 404 for an unknown job."""
        with self.store.read() as reader:
            found = reader.current_of(set(job_ids))
            return [status_of(*found[one]) if one in found else no_such_job(one) for one in job_ids]

    def list_jobs(
        self,
        state: str | None,
        dag_id: str | Sequence[str] | None,
        live: bool | None,
        limit: int,
        identity: Mapping[str, str | int] | None = None,
        after: tuple[float, str] | None = None,
        text: str | None = None,
    ) -> list[JobStatus]:
        """List jobs, newest first. ``identity`` filters by any of namespace, run_id, task_id and map_index.

        Each word of ``text`` must occur in the job's id, DAG, task, run or state, in any case.
        ``after`` is the position of a job, (submitted at in UTC seconds, id): only jobs that come after it are listed.
        """
        with self.store.read() as reader:
            found = reader.list_current(
                state=state,
                dag_id=dag_id,
                live=live,
                limit=limit,
                identity=identity,
                text=text,
                after=after,
                shown_only=True,
            )
            return [status_of(*one) for one in reader.with_generations(found)]

    def renew(self, job_id: str, claim: int) -> JobStatus:
        """Renew the lease, and return the status. Raises Refusal 404, 409."""
        (answer,) = self.renew_all([(job_id, claim)])
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def renew_all(self, asked: Sequence[Question]) -> list[JobStatus | Refusal]:
        """Renew the leases of several jobs, each with its claim; returns an answer for each, in the same order.

        Nothing is written except for a lease that is half over: the loop decides on silent jobs by the count in the
        store, and would otherwise miss a client that returns just then. Where another process decides, what was last
        written must not be older than a quarter of the lease.
        """
        with self.store.read() as reader:
            found = reader.current_of({job_id for job_id, _ in asked})
            answers = [self._told(found.get(job_id), job_id, claim) for job_id, claim in asked]
        heard = [found[one.job_id].row for one in answers if isinstance(one, JobStatus) and not one.state.terminal]
        now = self.clock()
        if self.hears_renewals():
            for row in heard:
                self.renewals.add(row.job_id, row.incarnation)
            late = [row for row in heard if (row.lease_expires_at or math.inf) - now < row.lease_s / 2]
        else:
            late = [row for row in heard if row.heard_at is None or now - row.heard_at > row.lease_s / 4]
        if late:
            with self.store.write() as tx:
                for key in {(row.job_id, row.incarnation) for row in late}:
                    current = tx.incarnation(*key)
                    if current is not None:
                        current.renewals, current.heard_at = _next(current.renewals), now
        if any(row.parked for row in heard):
            self.notifier.wake()
        return answers

    @staticmethod
    def _told(found: Current | None, job_id: str, claim: int) -> JobStatus | Refusal:
        if found is None:
            return no_such_job(job_id)
        job, row, generations = found
        return status_of(job, row, generations) if claim == job.claim else stale_claim(job_id, claim, job.claim)

    def cancel(self, job_id: str, claim: int, reason: str) -> JobStatus:
        """Cancel a job, once its workers have saved and left; a terminal job is unchanged. Raises Refusal 404, 409."""
        with self.store.write() as tx:
            _, row = _claimed(tx, job_id, claim)
            if not row.terminal and row.cancel_reason is None:
                row.cancel_reason = reason or "cancelled by its owner"
        self.notifier.wake()
        return self.status(job_id)

    def acknowledge(self, job_id: str, claim: int) -> JobStatus:
        """Note that Airflow has recorded the success, so the next submit trains anew. Raises Refusal 404, 409."""
        with self.store.write() as tx:
            _, row = _claimed(tx, job_id, claim)
            if row.state != State.SUCCEEDED:
                raise Refusal(
                    409,
                    "not_succeeded",
                    f"job {job_id} is {row.state}, and only a success can be acknowledged",
                    "look at its status first",
                )
            if not row.acknowledged:
                row.acknowledged = True
                tx.add_event(EventKind.ACKNOWLEDGED, Reason("Airflow has recorded the success"), row)
        self.notifier.changed()
        return self.status(job_id)

    def amend(self, job_id: str, request: AmendRequest) -> int:
        """Ask for another deadline or value; returns the amendment's id for the answer. Raises Refusal 404, 409.

        Of a job that was rejected, failed or cancelled, it changes what its later attempts ask for.
        """
        with self.store.write() as tx:
            _, row = _claimed(tx, job_id, request.claim)
            amendment = AmendmentRow(
                job_id=job_id,
                incarnation=row.incarnation,
                deadline_at=request.deadline_at,
                value=request.value,
                best_effort=request.best_effort,
            )
            if has_ended_badly(row) or request.next_attempt:
                amendment.answer = answer_for_next_attempt(row, request, self.clock())
                if amendment.answer.accepted:
                    terms = AmendedData(deadline_at=request.deadline_at, value=request.value or row.value)
                    tx.add_event(terms, amendment.answer.reason, row)
            tx.add(amendment)
            tx.session.flush()
            amendment_id = amendment.amendment_id
        self.notifier.wake()
        return amendment_id

    def answered(self, amendment_ids: Collection[int]) -> dict[int, AmendmentAnswer]:
        """Return the answers of the loop to these amendments, by id; those without an answer are left out."""
        with self.store.read() as reader:
            return reader.answered(amendment_ids)

    def drain(self, node_id: str, until_at: float | None) -> None:
        """Set when a node goes away (UTC seconds), or None if it stays, with all its slots.

        The caller checks that the node exists.
        """
        with self.store.write() as tx:
            row = tx.session.get(DrainRow, node_id)
            if until_at is None:
                if row is not None:
                    tx.session.delete(row)
                of_node = AvoidedSlotRow.node_id == node_id
                tx.session.execute(sa.update(AvoidedSlotRow).where(of_node).values(until_at=self.clock()))
            elif row is None:
                tx.add(DrainRow(node_id=node_id, until_at=until_at))
            else:
                row.until_at = until_at
        self.notifier.wake()

    # -- inside -------------------------------------------------------------------------------------------------

    def _check(self, job_id: str, submission: JobSubmission) -> None:
        if submission.identity.job_id != job_id:
            raise wrong_job_id(job_id, submission.identity.job_id)
        sha256 = submission.command.snapshot
        if not self.snapshots.has(sha256):
            raise Refusal(422, "snapshot_missing", f"the code {sha256} was not uploaded", "upload the snapshot first")
        script = submission.command.script
        if script is not None:
            root = self._code_of(sha256)
            path = Path(os.path.realpath(root / script))
            # os.path returns False for an impossible path (too long together with its folder) instead of raising.
            if not path.is_relative_to(os.path.realpath(root)) or not os.path.isfile(path):
                raise Refusal(
                    422,
                    "script_missing",
                    f"script {script!r} is not in the uploaded code",
                    "check script= and .gitignore",
                )
        python = submission.command.python
        if python is not None and not os.path.isfile(python):
            raise Refusal(
                422,
                "interpreter_missing",
                f"python={python!r}: there is no such interpreter on the machine of the service",
                "give the absolute path of one that has torch, or leave python= out",
            )
        slots = self.slots()
        if slots and submission.min_workers > slots:
            raise Refusal(
                422,
                "too_many_workers",
                never_fits(submission.min_workers, slots),
                "ask for fewer workers",
            )

    def _code_of(self, sha256: str) -> Path:
        """Return the folder of uploaded code. Raises Refusal when it cannot be unpacked here."""
        try:
            return self.snapshots.ensure(sha256)
        except SnapshotLostError as error:
            raise Refusal(422, "snapshot_missing", str(error), "upload the snapshot again") from error
        except OSError as error:
            raise Refusal(
                507,
                "disk",
                f"the code could not be unpacked: {error.strerror or error}",
                "free space in the state directory",
            ) from error

    def _attach(
        self, tx: Writer, row: IncarnationRow, asked: StoredSubmission, submission: JobSubmission
    ) -> tuple[list[str], int | None]:
        """Continue a job; returns warnings for its owner, and the id of the amendment that it asks for, if any."""
        row.renewals, row.heard_at = _next(row.renewals), self.clock()
        row.lease_s, row.orphan_s = submission.lease_s, submission.orphan_s
        if row.terminal:
            return [], None
        warnings = []
        changed = [name for name in _SETTINGS if getattr(asked.command, name) != getattr(submission.command, name)]
        if changed:
            warnings.append(
                f"{'=, '.join(changed)}= differ from what the job was submitted with, and it goes on with that. Clear "
                "the task after it has ended to train with the new ones."
            )
        wanted: dict[str, Any] = {
            "deadline_at": submission.deadline_at,
            "best_effort": submission.best_effort,
            "value": submission.value,
        }
        now, asked_at = self.clock(), submission.deadline_at
        if asked_at is not None and asked_at <= now:
            # A live job continues, however late it is: a deadline in the past cannot be promised.
            if row.deadline_at is not None and row.deadline_at > now:
                warnings.append(
                    f"the deadline {moment(asked_at)} has passed already; {moment(row.deadline_at)} holds on"
                )
            asked_at = None  # leaves the deadline as it is
            wanted |= {"deadline_at": asked.deadline_at, "best_effort": asked.best_effort}
        if wanted == {"deadline_at": asked.deadline_at, "best_effort": asked.best_effort, "value": asked.value}:
            return warnings, None
        amendment = AmendmentRow(
            job_id=row.job_id,
            incarnation=row.incarnation,
            deadline_at=asked_at,
            value=submission.value,
            best_effort=submission.best_effort,
        )
        tx.add(amendment)
        row.submission = row.submission.model_copy(update=wanted)
        tx.session.flush()
        return warnings, amendment.amendment_id

    def _warn_of_changed_code(self, old: str, new: str) -> list[str]:
        if old == new:
            return []
        try:
            files = self.snapshots.changed_files(old, new)
        except (SnapshotLostError, OSError) as error:  # The job was submitted; this only tells more of it.
            named = f"unknown, since {error}"
        else:
            named = ", ".join(files[:_NAMED_FILES]) + (", …" if len(files) > _NAMED_FILES else "")
        warning = (
            "the code has changed since the job was submitted, and the job goes on with what was submitted; changed: "
            f"{named or 'names only'}. Clear the task after it has ended to train with the new code."
        )
        return [warning]

    def _new_job(self, tx: Writer, job_id: str, submission: JobSubmission) -> JobRow:
        identity = submission.identity
        job = JobRow(
            job_id=job_id,
            identity=identity,
            recurring_key=identity.recurring_key,
            dag_id=identity.dag_id,
            claim=0,
            incarnation=0,
            generation=0,
            created_at=self.clock(),
        )
        tx.add(job)
        tx.session.flush()
        return job

    def _supersede(self, row: IncarnationRow | None) -> None:
        if row is not None and not row.terminal and row.cancel_reason is None:
            row.cancel_reason = "superseded: the task was submitted again with a changed specification"

    def _open(
        self, tx: Writer, job: JobRow, resumed: IncarnationRow | None, submission: JobSubmission, sealed: bytes | None
    ) -> IncarnationRow:
        """Open a new incarnation. It takes over the progress of the ``resumed`` one when that has ended."""
        job.incarnation += 1
        while self.has_files(job.job_id, job.incarnation):
            job.incarnation += 1  # This folder belongs to a lost database: no training continues from it.
        init_from = submission.init_from
        if init_from == "latest":
            latest = tx.last_success(job.recurring_key, job.job_id)
            result = None if latest is None else readable(latest.result)
            init_from = None if result is None else result.checkpoint_path
        row = IncarnationRow(
            job_id=job.job_id,
            incarnation=job.incarnation,
            submission=StoredSubmission.of(submission),
            secret_env=sealed,
            equality_key=submission.equality_key(),
            submitted_at=self.clock(),
            resume_from=None if resumed is None else resumed.incarnation,
            init_from_path=init_from,
            seed=submission.seed,
            lease_s=submission.lease_s,
            orphan_s=submission.orphan_s,
            renewals=1,
            heard_at=self.clock(),
            deadline_at=None if submission.best_effort else submission.deadline_at,
            best_effort=submission.best_effort,
            value=submission.value,
        )
        tx.add(row)
        return row


def _next(count: int) -> int:
    """Return the next count. Counts are only compared for equality, so one out of bounds restarts at 1."""
    return count + 1 if 0 <= count < bounds.MOST_COUNT else 1


def _current(reader: Reader, job_id: str) -> tuple[JobRow, IncarnationRow]:
    found = reader.current(job_id)
    if found is None:
        raise no_such_job(job_id)
    return found


def _claimed(reader: Reader, job_id: str, claim: int) -> tuple[JobRow, IncarnationRow]:
    job, row = _current(reader, job_id)
    if claim != job.claim:
        raise stale_claim(job_id, claim, job.claim)
    return job, row


def _claim_of(job: JobRow, key: str) -> tuple[int, int] | None:
    """Return the claim and the incarnation that a submission got when it came first; None if it did not come."""
    return next(((claim, incarnation) for one, claim, incarnation in job.claimed_by or () if one == key), None)
