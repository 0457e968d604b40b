"""Every Python snippet of the pages about the operator runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from airflow.sdk import DAG

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "reference/operator.md",
    "how-to/deadlines.md",
    "how-to/write-dags.md",
    "how-to/retrain-from-yesterday.md",
    "how-to/wait-for-a-training.md",
    "how-to/alerts.md",
    "how-to/model-registry.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page):
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert snippets
    scope: dict[str, object] = {}
    with DAG("docs", schedule=None):
        for snippet in snippets:
            exec(compile(snippet, page, "exec"), scope)


def test_reference_names_every_argument():
    import inspect

    from elasticflow_airflow.operators import ElasticTrainOperator
    from elasticflow_airflow.settings import AirflowSettings

    text = (DOCS / "reference/operator.md").read_text()
    parameters = [n for n in inspect.signature(ElasticTrainOperator.__init__).parameters if n not in ("self", "kwargs")]
    missing = [name for name in parameters if f"`{name}`" not in text]
    assert missing == []
    assert [n for n in ElasticTrainOperator.template_fields if not re.search(rf"`{n}` \*\*T\*\*", text)] == []
    settings = [name.replace("_max_bytes", "_max_mib") for name in AirflowSettings.__dataclass_fields__]
    configuration = (DOCS / "reference/configuration.md").read_text()
    assert [name for name in settings if f"| `{name}` |" not in configuration] == []


def test_every_command_of_airflow_is_named():
    from elasticflow_airflow.airflow_cli import get_commands

    page = (DOCS / "reference/cli.md").read_text()
    section = re.search(r"^## Under Airflow\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert section
    (group,) = get_commands()
    assert [command.name for command in group.subcommands if f"`{command.name}" not in section[1]] == []
    of_airflow_alone = [command for command in group.subcommands if command.name in ("forecast", "feed")]
    flags = {flag for command in of_airflow_alone for arg in command.args for flag in arg.flags if flag[:2] == "--"}
    assert {flag for flag in flags if flag not in page} == set()
