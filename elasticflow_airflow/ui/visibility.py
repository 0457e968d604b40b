"""Filters the service's responses to what one user may see. Pure: knows neither Airflow nor HTTP.

A service may serve several Airflows (namespaces), and a user may be allowed to read only some DAGs. Jobs of other DAGs
are left out of lists. Where they hold slots they remain as anonymous blocks, as the view of the cluster would otherwise
be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticflow_airflow.api import ForecastAnswer, ForecastItem, JobIdentity, JobStatus, SlotStatus
from elasticflow_airflow.api.insight import (
    Admission,
    ClusterHistory,
    ClusterNow,
    DagTotals,
    JobStory,
    Span,
    WhatIf,
)
from elasticflow_airflow.api.status import Mention

SOMEBODY = "another job"
_ASIDE = "A job that you may not see is set aside, as the service failed on it; all others go on."
_WRONG = "Its log says which: the text may name what you may not see."
_TASK = re.compile(r"(?<![\w./-])[\w-]+(?:\.[\w-]+)+(?:\[\d+\])?(?![\w/-])")
_JOB_ID = re.compile(r"(?<![\w-])[a-z0-9][a-z0-9-]*-[0-9a-f]{16}(?![\w-])")


@dataclass(frozen=True, slots=True)
class VisibilityFilter:
    """A filter by the DAGs that a user may read, in this Airflow's namespace.

    ``names`` maps job ids to display names. ``hidden_dags`` and ``hidden_tasks`` must not appear in any sentence.
    """

    namespace: str
    readable: frozenset[str]
    names: Mapping[str, str] = field(default_factory=dict)
    hidden_dags: frozenset[str] = frozenset()
    hidden_tasks: frozenset[str] = frozenset()

    def sees(self, identity: JobIdentity) -> bool:
        """Whether this job may be shown."""
        return identity.namespace == self.namespace and identity.dag_id in self.readable

    def knowing(self, jobs: Iterable[JobStatus]) -> VisibilityFilter:
        """Return a filter that also knows the names of these jobs, visible and hidden ones."""
        names, hidden = dict(self.names), set(self.hidden_tasks)
        for job in jobs:
            name = f"{job.identity.dag_id}.{job.identity.task_id}"
            if self.sees(job.identity):
                names[job.job_id] = name
            else:
                hidden.add(name)
        return replace(self, names=names, hidden_tasks=frozenset(hidden - set(names.values())))

    def text(self, text: str) -> str:
        """Return a text for this user. Hidden names are replaced: job ids in reasons, and dag.task as people write it.

        Only for words that are not the service's own, and for sentences of older services: others come with the
        positions of what they mention; see ``sentence``.
        """
        named = _JOB_ID.sub(lambda found: self.names.get(found.group(), SOMEBODY), text)
        return _TASK.sub(lambda found: SOMEBODY if self._hides(found.group()) else found.group(), named)

    def sentence(self, text: str, mentions: Iterable[Mention]) -> str:
        """Return a sentence without the names that the user may not read; jobs get the names of their tasks."""
        for one in sorted(mentions, key=lambda one: -one.at):
            until = one.at + one.length
            text = text[: one.at] + self._shown(text[one.at : until], one) + text[until:]
        return text

    def _shown(self, words: str, mention: Mention) -> str:
        if mention.job_id is not None:
            return self.names.get(mention.job_id, SOMEBODY)
        if mention.dag_id:
            return words if self._mine(mention) else SOMEBODY
        return self.text(words)

    def problems(self, problems: list[str]) -> list[str]:
        """Filter the problems of the service and of single jobs. The text of an error may name anything hidden."""
        if not (self.hidden_dags or self.hidden_tasks):
            return problems
        return list(dict.fromkeys(map(self._problem, problems)))

    def _problem(self, problem: str) -> str:
        """Filter one problem; if it begins with a job id, it belongs to that job."""
        job = _JOB_ID.match(problem)
        if job is None:
            return _WRONG
        return self.text(problem) if job.group() in self.names else _ASIDE

    def plain(self, value: Any) -> Any:
        """Return a JSON value with its texts filtered for this user; ids in separate fields are unchanged."""
        if isinstance(value, str):
            return self.text(value) if " " in value else value
        if isinstance(value, list):
            return [self.plain(one) for one in value]
        if isinstance(value, dict):
            mentions = value.get("mentions", {})
            known = {name: map(Mention.model_validate, found) for name, found in mentions.items() if name in value}
            sentences = {name: self.sentence(value[name], found) for name, found in known.items()}
            rest = {key: self.plain(one) for key, one in value.items() if key not in sentences and key != "mentions"}
            return {**rest, **sentences}
        return value

    def cluster(self, now: ClusterNow) -> ClusterNow:
        """Return the cluster with visible jobs only; slots of hidden jobs are shown as busy."""
        seen = [job for job in now.jobs if self.sees(job.identity)]
        ids = {job.job_id for job in seen}
        slots = [self._slot(slot, ids) for slot in now.slots]
        why = {job: self.sentence(text, now.why_names.get(job, ())) for job, text in now.why.items() if job in ids}
        return now.model_copy(update={"jobs": seen, "slots": slots, "why": why, "why_names": {}})

    def story(self, story: JobStory) -> JobStory:
        """Return the filtered story of a visible job."""
        return story.model_copy(update={"why": self.sentence(story.why, story.why_names), "why_names": []})

    def history(self, history: ClusterHistory) -> ClusterHistory:
        """Return past and planned allocations, with hidden jobs as anonymous blocks."""
        return history.model_copy(
            update={
                "spans": [self._span(span) for span in history.spans],
                "planned": [self._span(span) for span in history.planned],
                "admissions": [one for one in history.admissions if self._mine(one)],
                "by_dag": [one for one in history.by_dag if self._mine(one)],
            }
        )

    def forecast(self, answer: ForecastAnswer) -> ForecastAnswer:
        """Return the forecast of visible items, with recomputed counts."""
        items = [item for item in answer.items if self._foresees(item)]
        if len(items) == len(answer.items):
            return answer
        kept = sum(item.outcome == "kept" for item in items)
        lost = sum(item.outcome in ("at_risk", "missed") for item in items)
        summary = f"of the deadlines that you can see, {kept} will be met and {lost} missed" if items else ""
        return answer.model_copy(update={"items": items, "kept": kept, "not_kept": lost, "summary": summary})

    def what_if(self, answer: WhatIf) -> WhatIf:
        """Return both forecasts for visible items. Verdicts concern only jobs of the request."""
        return answer.model_copy(update={"before": self.forecast(answer.before), "after": self.forecast(answer.after)})

    def _hides(self, token: str) -> bool:
        task = token.partition("[")[0]
        parts = task.split(".")
        return task in self.hidden_tasks or any(
            ".".join(parts[:end]) in self.hidden_dags for end in range(1, len(parts))
        )

    def _mine(self, one: Span | Admission | DagTotals | Mention) -> bool:
        return one.namespace == self.namespace and one.dag_id in self.readable

    @staticmethod
    def _slot(slot: SlotStatus, seen: set[str]) -> SlotStatus:
        if slot.busy is not None:  # Hide the other service's owner and its state directory.
            return slot.model_copy(update={"job_id": None, "busy": "another service"})
        if slot.job_id is not None and slot.job_id not in seen:
            return slot.model_copy(update={"job_id": None, "busy": SOMEBODY})
        return slot

    def _span(self, span: Span) -> Span:
        if self._mine(span):
            return span
        names = dict.fromkeys(("job_id", "namespace", "dag_id", "task_id", "run_id", "purpose", "reason"), "")
        return span.model_copy(update={**names, "mentions": {}, "map_index": -1, "generation": None, "incarnation": 1})

    def _foresees(self, item: ForecastItem) -> bool:
        return item.namespace == self.namespace and item.dag_id in self.readable
