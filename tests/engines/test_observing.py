"""A look at gangs: what has not changed is not read again, and nothing that matters is overlooked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elasticflow_airflow.engines.local import observing
from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder, WorkerStatus
from elasticflow_airflow.engines.local.files.records import GangRecord, JobRecord
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.machines import Changes
from elasticflow_airflow.engines.local.observing import Observer
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState
from elasticflow_airflow.runtime.protocol import Report, ReportKind, append_report, report_path
from elasticflow_airflow.scheduler_core.model.values import Slot

OWN = ProcessId.of(1)


@dataclass
class MachinesThatCount:
    """Machines that tell what has changed, as those of a cluster do; all else that an observer asks is constant."""

    now: Changes = field(default_factory=lambda: Changes(1, 1))
    given_up: set[Path] = field(default_factory=set)

    def changes(self, _folder: Path) -> Changes:
        return self.now

    def clock_offset_s(self, _node_id: str) -> float:
        return 0.0

    def was_given_up(self, folder: SupervisorFolder) -> bool:
        return folder.path in self.given_up

    def is_coming_up(self, _folder: SupervisorFolder) -> bool:
        return False

    def is_alive(self, folder: SupervisorFolder, _status: Status) -> bool:
        return folder.path not in self.given_up

    def end_leftovers(self, _supervisors: object) -> bool:
        return False

    def held_by(self, _job_id: str, _wanted: object) -> dict[Slot, object]:
        return {Slot("node0", 0): {}}


@dataclass
class Training:
    """A job with one worker that trains."""

    machines: MachinesThatCount
    observer: Observer
    job: JobRecord
    gang: GangRecord
    status: Status
    reads: list[Path]

    @property
    def folder(self) -> SupervisorFolder:
        return self.gang.folder_of(0)

    def look(self) -> GangObservation:
        found = self.observer.observe(self.job, self.gang)
        self.observer.handed_over()
        return found

    def say(self, kind: ReportKind, step: int = 0) -> None:
        worker_id, generation = self.gang.worker_id(0), self.gang.generation
        report = Report(kind=kind, generation=generation, worker_id=worker_id, rank=0, step=step, data={})
        append_report(report_path(Path(self.gang.incarnation_dir), generation, worker_id), report)
        self.machines.now = self.machines.now._replace(reports=self.machines.now.reports + 1)

    def state_changed(self) -> None:
        self.machines.now = self.machines.now._replace(states=self.machines.now.states + 1)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    gang = GangRecord(
        generation=1,
        incarnation=1,
        incarnation_dir=str(tmp_path),
        placement=(Slot("node0", 0),),
        plain=False,
        grace_s=5.0,
        started=True,
        chain=1,
    )
    job = JobRecord(job_id="job", latest=1, gangs={1: gang})
    machines, reads = MachinesThatCount(), list[Path]()
    found = Training(machines, Observer(machines, lambda _: None), job, gang, Status(supervisor=OWN), reads)  # type: ignore[arg-type]
    found.status.workers[gang.worker_id(0)] = WorkerStatus(rank=0, agent=OWN, trainer=OWN)
    found.folder.path.mkdir(parents=True)
    found.folder.write_status(found.status)
    found.say(ReportKind.STARTED)
    assert found.look().state is GangState.RUNNING

    def noted(read: Callable[..., object]) -> Callable[..., object]:
        def reading(path: Path, *more: object) -> object:
            reads.append(path)
            return read(path, *more)

        return reading

    monkeypatch.setattr(observing, "read_some_reports", noted(observing.read_some_reports))
    monkeypatch.setattr(found.observer, "_read_status", noted(found.observer._read_status))
    return found


def test_nothing_is_read_where_nothing_has_come(training: Training) -> None:
    before = training.look()
    training.reads.clear()
    assert training.look() == before
    assert not training.observer.has_ended(training.job, training.gang)
    assert training.reads == []


def test_progress_is_read_without_a_look_at_the_supervisors(training: Training) -> None:
    training.look()
    training.reads.clear()
    training.say(ReportKind.PROGRESS, 7)
    found = training.look()
    assert [report.step for report in found.reports] == [7]
    assert found.state is GangState.RUNNING
    assert len(training.reads) == 1
    assert training.look().reports == ()  # each is handed over once


def test_reports_that_were_not_handed_over_are_told_again(training: Training) -> None:
    training.look()
    training.say(ReportKind.PROGRESS, 7)
    for _ in range(2):
        found = training.observer.observe(training.job, training.gang)
        assert [report.step for report in found.reports] == [7]


def test_reports_that_cannot_be_read_are_read_later(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.look()
    training.say(ReportKind.PROGRESS, 7)
    with monkeypatch.context() as broken:
        broken.setattr(observing, "read_some_reports", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(OSError, match="no"):
            training.look()
    assert [report.step for report in training.look().reports] == [7]


def test_an_end_is_seen(training: Training) -> None:
    training.look()
    training.say(ReportKind.FINISHED, 9)
    worker = training.status.workers[training.gang.worker_id(0)]
    worker.ended, worker.exit_code, training.status.ended = True, 0, True
    training.folder.write_status(training.status)
    training.state_changed()
    found = training.look()
    assert (found.state, found.outcome) == (GangState.ENDED, GangOutcome.FINISHED)
    assert [report.kind for report in found.reports] == [ReportKind.FINISHED]


def test_a_node_that_was_given_up_is_seen(training: Training) -> None:
    training.look()
    training.machines.given_up.add(training.folder.path)
    training.state_changed()
    found = training.look()
    assert (found.state, found.outcome) == (GangState.ENDED, GangOutcome.LOST)


def test_one_that_leaves_for_a_later_generation_is_looked_at_though_it_says_nothing(training: Training) -> None:
    training.look()
    later = replace(training.gang, generation=2, adopted=True, ids=(training.gang.worker_id(0),))
    training.job.gangs[2], training.job.latest = later, 2
    assert training.look().state is not GangState.RUNNING


def test_a_look_that_fails_after_its_reports_were_read_is_taken_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.look()
    training.say(ReportKind.STARTED)  # once more, of a session that can change in place
    with monkeypatch.context() as broken:
        broken.setattr(training.observer, "_read_statuses", lambda *_: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(OSError, match="no"):
            training.look()
    training.reads.clear()
    assert [report.kind for report in training.look().reports] == [ReportKind.STARTED]
    assert len(training.reads) == 2  # the status, and the reports once more


def test_what_is_left_of_many_reports_is_read_though_none_follows(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.look()
    monkeypatch.setattr("elasticflow_airflow.runtime.protocol.MOST_BYTES_A_LOOK", 100)
    monkeypatch.setattr(observing, "MOST_BYTES_A_LOOK", 100)
    for step in range(5):
        training.say(ReportKind.PROGRESS, step)
    found = [report.step for _ in range(5) for report in training.look().reports]
    assert found == list(range(5))


def test_a_folder_that_cannot_be_told_of_is_judged_by_its_slots(training: Training) -> None:
    training.look()

    def nowhere(_folder: Path) -> Changes:
        raise ValueError("not below the state directory")

    training.machines.changes = nowhere  # type: ignore[method-assign]
    assert not training.observer.has_ended(training.job, training.gang)
