"""Judges a history by what was seen at the database, at the nodes, in the storage and by clients: nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

Item = tuple[Any, ...]


class Broken(Enum):
    """A promise that a history does not keep."""

    LOST = "what was accepted is lost"
    UNSTORED = "something was acknowledged before it was stored"
    TWICE = "two results of one job"
    SLOT_SHARED = "two gangs on one slot"
    JOB_DOUBLED = "two gangs of one job at a time"
    UNDECIDED = "a gang started that nobody had decided to start, or that had ended"
    CANCELLED_FINISHED = "a job finished after its cancellation was accepted"
    STALE_WRITE = "a former leader wrote after its successor had read"
    STALE_COMMAND = "a node obeyed a former leader"
    EPOCH_FALLS = "the epoch did not grow, or a former epoch was granted something"
    TWO_MANDATES = "two replicas take themselves for the leader"
    NO_LEADER = "nobody decides long after the last fault"
    STUCK = "a job is not finished long after the last fault"


class Violation(NamedTuple):
    """One broken promise."""

    broken: Broken
    when_s: float
    what: str

    def __str__(self) -> str:
        return f"{self.broken.value}, at {self.when_s:.3f}: {self.what}"


def check(history: Sequence[Item], *, whatever_clocks_do: bool = False) -> list[Violation]:
    """Return what is wrong with a history, in no order.

    Where clocks do not keep their promise, two replicas may take themselves for the leader, unless
    ``whatever_clocks_do``.
    """
    return _Judge(history, whatever_clocks_do).violations()


class _Judge:
    def __init__(self, history: Sequence[Item], whatever_clocks_do: bool) -> None:
        self._history = history
        self._found: list[Violation] = []
        self._by_kind: dict[str, list[Item]] = {}
        for item in history:
            kind = item[1]
            if kind in self._by_kind:
                self._by_kind[kind].append(item)
            else:
                self._by_kind[kind] = [item]
        _, _, is_promised, self._calm_s, self._replaced_s = history[0]
        self._is_promised = is_promised or whatever_clocks_do

    def violations(self) -> list[Violation]:
        self._check_rows()
        self._check_writes()
        self._check_decisions()
        self._check_commands()
        self._check_slots()
        self._check_clients()
        self._check_results()
        self._check_end()
        if self._is_promised:
            self._check_mandates()
        return self._found

    def _items(self, *kinds: str) -> Iterable[Item]:
        if len(kinds) == 1:
            return self._by_kind.get(kinds[0], ())
        return (item for item in self._history if item[1] in kinds)

    def _report(self, broken: Broken, when_s: float, what: str) -> None:
        self._found.append(Violation(broken, when_s, what))

    def _check_rows(self) -> None:
        highest, owner = 0, ("", -1)
        for when_s, _, ask, name, life, asked, epoch in self._items("granted"):
            who = (name, life)
            if ask in ("TAKE", "RAISE"):
                if epoch <= highest or (ask == "RAISE" and asked != highest):
                    self._report(Broken.EPOCH_FALLS, when_s, f"{ask} by {who}: {epoch} after {highest}")
                highest, owner = max(highest, epoch), who
            elif asked != highest or who != owner:
                self._report(Broken.EPOCH_FALLS, when_s, f"{ask} by {who} in {asked}, when {highest} is of {owner}")

    def _check_writes(self) -> None:
        read_by = 0
        for item in self._items("first read", "commit", "barrier"):
            epoch = item[4]
            if item[1] == "first read":
                read_by = max(read_by, epoch)
            elif epoch < read_by:
                self._report(Broken.STALE_WRITE, item[0], f"{item[2]}.{item[3]} in {epoch}, after a read in {read_by}")

    def _check_decisions(self) -> None:
        """Every gang that starts was granted these slots, and had not ended."""
        open_gangs: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
        for item in self._items("commit", "start"):
            if item[1] == "commit":
                for kind, job, *more in item[5]:
                    if kind == "place":
                        slots: dict[str, tuple[int, ...]] = {}
                        for node, index in more[0].placement:
                            slots[node] = (*slots.get(node, ()), index)
                        open_gangs[job, more[0].number] = slots
                    elif kind == "end":
                        open_gangs.pop((job, more[0]), None)
            else:
                when_s, _, node, gang, held = item
                if open_gangs.get(gang, {}).get(node) != held:
                    self._report(Broken.UNDECIDED, when_s, f"{gang} on {node}{held}")

    def _check_commands(self) -> None:
        seen: dict[str, tuple[int, int]] = {}
        for when_s, _, node, epoch, number in self._items("obeys"):
            last = seen.get(node, (0, 0))
            if (epoch, number) <= last:
                said = f"{node} obeys {number} of {epoch}, after {last[1]} of {last[0]}"
                self._report(Broken.STALE_COMMAND, when_s, said)
            else:
                seen[node] = (epoch, number)

    def _check_slots(self) -> None:
        by_slot: dict[tuple[str, int], list[tuple[float, float, Any]]] = {}
        by_job: dict[str, list[tuple[float, float, Any]]] = {}
        for _, _, node, gang, slots, began_s, ends_s in self._items("held"):
            for index in slots:
                by_slot.setdefault((node, index), []).append((began_s, ends_s, gang))
            by_job.setdefault(gang[0], []).append((began_s, ends_s, gang))
        for broken, of in ((Broken.SLOT_SHARED, by_slot), (Broken.JOB_DOUBLED, by_job)):
            for what, holdings in of.items():
                if len(holdings) < 2:
                    continue
                holdings.sort()
                until_s, last = -1.0, None
                for began_s, ends_s, gang in holdings:
                    if began_s < until_s and gang != last:
                        self._report(broken, began_s, f"{what}: {last} until {until_s:.3f}, and {gang}")
                    if ends_s > until_s:
                        until_s, last = ends_s, gang

    def _check_clients(self) -> None:
        stored = {item[4]: item[0] for item in self._items("stored")}
        final: dict[str, str] = self._history[-1][3]
        for when_s, _, what, name, answer in self._items("answered"):
            if what == "submit" and name not in final:
                self._report(Broken.LOST, when_s, f"{name}, acknowledged then")
            elif what == "submit" and stored.get(name, when_s) > when_s:
                self._report(Broken.UNSTORED, when_s, f"{name}, stored at {stored[name]:.3f}")
            if what == "cancel" and answer == "accepted" and final.get(name) != "cancelled":
                self._report(Broken.CANCELLED_FINISHED, when_s, f"{name} is {final.get(name)}")

    def _check_results(self) -> None:
        results: dict[str, str] = {}
        for item in self._items("commit", "published"):
            found = [(item[3], item[4])] if item[1] == "published" else []
            if item[1] == "commit":
                found = [(job, more[0]) for kind, job, *more in item[5] if kind == "finish"]
            for job, result in found:
                if results.setdefault(job, result) != result:
                    self._report(Broken.TWICE, item[0], f"{job}: {results[job]!r} and {result!r}")

    def _check_mandates(self) -> None:
        """Compare them by true time: each lasts as long as its holder knew last, or until it gave it up or died."""
        spans: dict[tuple[str, int], list[list[float]]] = {}
        for item in self._items("mandate", "mandate ends", "resigns", "killed"):
            when_s, kind, name, life = item[:4]
            mine = spans.setdefault((name, life), [])
            if kind != "mandate":
                if mine:
                    mine[-1][1] = min(mine[-1][1], when_s)
            elif mine and when_s <= mine[-1][1]:
                mine[-1][1] = item[5]
            elif item[5] > when_s:
                mine.append([when_s, item[5]])
        every = sorted((begun_s, ends_s, who) for who, mine in spans.items() for begun_s, ends_s in mine)
        until_s, last = -1.0, None
        for begun_s, ends_s, who in every:
            if begun_s < until_s and who != last:
                self._report(Broken.TWO_MANDATES, begun_s, f"{last} until {until_s:.3f}, and {who}")
            if ends_s > until_s:
                until_s, last = ends_s, who

    def _check_end(self) -> None:
        when_s, _, is_over, final = self._history[-1]
        begun = [item[0] for item in self._items("decides") if item[0] > self._calm_s]
        if not begun or begun[0] > self._calm_s + self._replaced_s:
            said = f"not before {begun[0]:.3f}" if begun else "never"
            self._report(Broken.NO_LEADER, self._calm_s, said)
        if not is_over:
            self._report(Broken.STUCK, when_s, f"jobs are {final}")


def written(history: Iterable[Item]) -> str:
    """Return a history for people, an item a line."""
    return "\n".join(f"{when_s:9.3f} {kind}: {_said(details)}" for when_s, kind, *details in history)


def _said(details: Sequence[Any]) -> str:
    return ", ".join(f"{one:.3f}" if isinstance(one, float) else str(one) for one in details)
