"""Kills every few seconds, and still every sample is used once an epoch: the optimizer itself keeps the books.

Equal weights do not prove it alone. See tests/support/train_ledger.py for how the optimizer counts.
"""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support.gang import Gang

from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

SCRIPT = Path(__file__).parents[1] / "support" / "train_ledger.py"
STEPS_PER_EPOCH = 28


class Killed(Gang):
    """A gang whose members are killed at random, one of them or all, and that always gets others."""

    def __init__(self, root: Path, epochs: int, step_s: float, *, fetchers: int = 0, interval_s: float = 0.5) -> None:
        env = {"TEST_STEP_S": str(step_s), "TEST_FETCHERS": str(fetchers)}
        super().__init__(
            root,
            SCRIPT,
            env,
            epochs=epochs,
            global_batch_size=32,
            logical_workers=8,
            checkpoint_interval_s=interval_s,
        )
        self.steps = epochs * STEPS_PER_EPOCH
        self.kills = {"one": 0, "all": 0}
        self._born = 0

    def newcomers(self, count: int) -> list[str]:
        self._born += count
        return [f"w{number}" for number in range(self._born - count, self._born)]

    def promote_newest(self) -> None:
        """What the service does with each checkpoint that is reported."""
        saved = max(self.reports(ReportKind.CHECKPOINT), key=lambda report: report.step, default=None)
        if saved is not None:
            promote(self.folder / "checkpoints", verify_candidate(self.folder / "checkpoints" / saved.data["path"]))

    def live(self, seed: int, every_s: tuple[float, float]) -> None:
        """Kill one worker, or all of them, now and then, until the training has come to its end."""
        random_ = random.Random(seed)
        self.plan(*self.newcomers(2))
        self.wait_until_begun()
        next_s = time.monotonic() + random_.uniform(*every_s)
        while not self.reports(ReportKind.FINISHED):
            is_time = partial(self._is_time, next_s)
            self.wait(is_time, "the next kill")
            if self.reports(ReportKind.FINISHED):
                break
            self.promote_newest()
            alive = [member for member in self.members if self.processes[member].poll() is None]
            if len(alive) > 1 and random_.random() < 0.6:
                victim = random_.choice(alive)
                self.kill(victim, random_.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                survivors = [member for member in alive if member != victim]
                self.plan(*survivors[: 1 << (len(survivors).bit_length() - 1)], lost=[victim])
                self.wait(self._has_begun_or_ended, "those who are left")
                self.kill(victim)
                self.kills["one"] += 1
                # Back to where it was.
                self.plan(*self.members, *self.newcomers(len(self.members)))
            else:
                for member in self.processes.values():
                    member.kill()
                for member in self.processes.values():
                    member.wait()
                self.kills["all"] += 1
                if self.reports(ReportKind.FINISHED):
                    break
                self.promote_newest()
                self.plan(*self.newcomers(random_.choice([1, 2])), mode=RescaleMode.RESTART)
            self.wait(self._has_begun_or_ended, "those who come")
            next_s = time.monotonic() + random_.uniform(*every_s)
        if not self.has_begun():
            self.plan(mode=RescaleMode.RESTART)
        self.finish()

    def _is_time(self, at_s: float) -> bool:
        return time.monotonic() >= at_s or bool(self.reports(ReportKind.FINISHED))

    def _has_begun_or_ended(self) -> bool:
        return self.has_begun() or bool(self.reports(ReportKind.FINISHED))

    def books(self) -> dict[int, set[tuple[str, str]]]:
        """For each epoch, what was the least and the most that any sample was used by its end."""
        found: dict[int, set[tuple[str, str]]] = {}
        for line in self.output():
            if line.startswith("EPOCH"):
                _, epoch, _, least, most = line.split()
                found.setdefault(int(epoch), set()).add((least, most))
        return found

    def weights(self) -> set[str]:
        return {line.split()[1] for line in self.output() if line.startswith("WEIGHTS")}


def check(root: Path, *, epochs: int, seed: int, step_s: float, every_s: tuple[float, float], fetchers: int) -> Killed:
    with Killed(root / "undisturbed", epochs, 0.0) as undisturbed:
        undisturbed.plan("alone")
        assert undisturbed.finish() == {"alone": 0}, undisturbed.story()
    with Killed(root / "killed", epochs, step_s, fetchers=fetchers) as killed:
        killed.live(seed, every_s)
        expected = {epoch: {(f"{epoch + 1:.6f}",) * 2} for epoch in range(epochs)}
        assert undisturbed.books() == expected
        # An epoch's end is printed twice where all were killed after it, and went on from before it.
        assert killed.books() == expected, killed.story()
        assert killed.weights() == undisturbed.weights(), killed.story()
        return killed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_epochs_with_kills(tmp_path):
    killed = check(tmp_path, epochs=10, seed=1, step_s=0.08, every_s=(1.0, 4.0), fetchers=0)
    assert killed.kills["one"] + killed.kills["all"] >= 3, killed.kills


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fetchers", [0, 2])
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_lives_of_ten_epochs_with_kills(tmp_path, seed, fetchers):
    killed = check(tmp_path, epochs=10, seed=seed, step_s=0.3, every_s=(1.0, 6.0), fetchers=fetchers)
    assert killed.kills["one"] + killed.kills["all"] >= 8, killed.kills
