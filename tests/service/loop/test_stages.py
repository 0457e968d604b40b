"""Every stage of the pass that handles single jobs: where it fails for one, all others are decided on.

``STAGES`` says for each call of the pass what it does on behalf of jobs. A call that is not in it, and a piece of work
that no call names, fail the first two tests: whoever adds a stage adds it here, and it is tried like the others.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elasticflow_airflow import service
from elasticflow_airflow.service.decisions.fault_attribution import Faults
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.loop.reconcile import Reconciler
from elasticflow_airflow.service.loop.stages import _wake, stages
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.store.tables import AmendmentRow

pytestmark = pytest.mark.trouble

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FOR_ALL = "nothing on behalf of single jobs"
STAGES = {
    "setting_aside.notice_troubles": ("looking at its workers",),
    "self._bounds.check": ("reading what is known of it",),
    "self._restore": ("reading what the scheduler remembered of it",),
    "tell_nodes": ("looking whether its workers leave",),
    "observing.fold": ("taking in what its workers report", "writing down what was decided"),
    "checkpoint_promotion.record": ("taking in what was found out about its checkpoints",),
    "resuming.record": ("taking in the checkpoint that it goes on from",),
    "rescaling.heal": ("looking after its workers",),
    "slow_workers.watch": ("comparing the speeds of its workers",),
    "record_refusals": ("writing down why its workers did not start",),
    "restart_or_end.settle": ("deciding what the end of its workers means",),
    "introducing.cancel": ("cancelling it",),
    "parts.leases.check": ("looking whether its owner is there",),
    "parts.recurring_runs.keep": ("expecting the runs of this task",),
    "introducing.introduce": ("asking the scheduler about it",),
    "introducing.amend": ("asking the scheduler about an amendment of it",),
    "watching.watch_deadlines": ("watching its deadline",),
    "parts.hang_detector.watch_gangs": ("watching whether its workers hang",),
    "rescaling.break_circles": ("looking for whom it waits",),
    "restart_or_end.conclude": ("bringing it to its end",),
    "checkpoint_promotion.ask": ("asking what its checkpoints are worth",),
    "self._write_states": ("writing down what the scheduler remembers of it",),
    "self._actuator.act": ("starting, changing or stopping its workers", "keeping its workers"),
    # What is done for all of them together, for those that are set aside, or for nobody's gangs.
    "parts.notice_clock": FOR_ALL,
    "self._leftovers.look": FOR_ALL,
    "self._leftovers.held": FOR_ALL,
    "unknown_gangs.number_above": FOR_ALL,
    "setting_aside.place": FOR_ALL,
    "setting_aside.write_down": FOR_ALL,
    "setting_aside.look_after": FOR_ALL,
    "setting_aside.ended": FOR_ALL,
    "record_drained": FOR_ALL,
    "feed": FOR_ALL,
    "parts.hear": FOR_ALL,
    "self._hear": FOR_ALL,
    "stage.run": FOR_ALL,
    "_wake": FOR_ALL,
    "self._publish": FOR_ALL,
    "self._attribute": FOR_ALL,
    "self._set_aside": FOR_ALL,
    "self._interval": FOR_ALL,
}
WORK = sorted({doing for done in STAGES.values() if done is not FOR_ALL for doing in done})


def calls_of_the_pass() -> set[str]:
    """What a pass calls with what it works on."""
    found = set()
    for method in (Reconciler._pass, stages, _wake, Reconciler._hear):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
            if isinstance(node, ast.Call) and any(
                isinstance(one, ast.Name) and one.id == "context" for one in node.args
            ):
                found.add(ast.unparse(node.func))
    return found


def work_on_behalf_of_jobs() -> set[str]:
    """What is done on behalf of single jobs anywhere in the service."""
    found = set()
    for path in Path(service.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = {
            target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "on_behalf_of":
                said = node.args[1]
                found.add(said.value if isinstance(said, ast.Constant) else named[ast.unparse(said)])
    return found


def test_every_call_of_the_pass_is_in_the_list():
    assert calls_of_the_pass() == STAGES.keys(), "say in STAGES what the new one does on behalf of single jobs"


def test_all_work_on_behalf_of_jobs_is_in_the_list():
    assert work_on_behalf_of_jobs() == set(WORK)


def happenings(world, bad):
    """All that may happen to a job, so that every stage has something to do for it. Each is given some passes."""
    job_id = bad.job.job_id
    yield
    with world.store.write() as tx:
        tx.add(AmendmentRow(job_id=job_id, incarnation=1, value=2.0, best_effort=False))
    yield
    with suppress(KeyError):
        world.engine.fail_worker(job_id)  # it goes on from a checkpoint, and the first start is refused
    world.engine.fail_next("apply", "the disk is full")
    yield
    world.restart()
    yield
    world.job_service.cancel(job_id, world.status(bad).claim, "enough")
    yield
    with suppress(Refusal):
        world.submit(task="bad", **BAD)  # it goes on where it was cancelled
    yield
    world.engine.spoil(job_id)
    yield


BAD = {"within": 3000, "steps": 4000, "scaling_curve": CURVE, "max_workers": 2, "lease_s": 5000}


@pytest.mark.parametrize("work", WORK)
def test_work_that_fails_for_a_job_fails_for_no_other(make_world, monkeypatch, work):
    world = make_world(nodes=2)
    name = world.submission(task="bad").identity
    real, note, hits, noted = PassContext.on_behalf_of, Faults.note, [], []

    def noting(faults, owner, doing, error):
        noted.append((owner, doing))
        note(faults, owner, doing, error)

    @contextmanager
    def broken(context, owner, doing):
        with real(context, owner, doing):
            yield
            if owner in (name.job_id, name.recurring_key) and doing == work:
                hits.append(owner)
                raise RuntimeError("cannot be done")

    good = world.submit(task="good", within=900, steps=600, scaling_curve=CURVE, lease_s=5000)
    monkeypatch.setattr(PassContext, "on_behalf_of", broken)
    monkeypatch.setattr(Faults, "note", noting)
    bad = world.submit(task="bad", next_run_at=world.now_s + 900, **BAD)
    for _ in happenings(world, bad):
        world.run(15)
        if hits:
            break
    assert work == "looking at its workers" or hits, "nothing has come to this stage"
    if work != "keeping its workers":  # whoever is set aside already is that, and no pass is begun again for it
        assert {doing for _, doing in noted} >= {work}
    assert {owner for owner, _ in noted} <= {name.job_id, name.recurring_key}
    assert not world.reconciler.problem
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    assert world.status(late).verdict.decision == "admitted"
    assert world.ended(good).state == world.ended(late).state == "succeeded"
