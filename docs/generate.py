"""Writes what the code knows best: ``make reference``, or ``--check`` to compare only.

That is parts of the reference and of the architecture page, what Airflow's parser has to know of the commands of
``airflow elasticflow``, how the page shows each kind of event, and the arguments in the operator's docstring.
A page has such a part between ``<!-- generated: NAME -->`` and ``<!-- end -->``; all else on it is written by hand.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import typer
from typer.models import OptionInfo, ParamMeta
from typer.utils import get_params_from_function

REFERENCE = Path(__file__).resolve().parent / "reference"
ARCHITECTURE = REFERENCE.parent / "explanation" / "architecture.md"
PACKAGE = REFERENCE.parents[1] / "elasticflow_airflow"
OPERATOR = REFERENCE.parents[1] / "operators" / "elastic_train.py"
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def routes() -> str:
    """The routes of the HTTP API, with what they take and answer."""
    from elasticflow_airflow.service.http.openapi import document

    rows = ["| call | what it does | request | response |", "|---|---|---|---|"]
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            given = [_parameter(p) for p in operation.get("parameters", []) if p["in"] in ("query", "header")]
            answer = next(body for status, body in operation["responses"].items() if status.startswith("2"))
            takes = ", ".join([*_schemas(content), *given])
            answers = ", ".join(_schemas(answer.get("content", {}))) or "204"
            does = " ".join(operation.get("description", "").split())
            rows.append(f"| `{method.upper()} {path}` | {_cell(does)} | {takes} | {answers} |")
    return "\n".join(rows)


def _parameter(given: dict[str, Any]) -> str:
    """Return a parameter of a route, with its default if it has one."""
    default = given["schema"].get("default")
    return f"`{given['name']}`" if default is None else f"`{given['name']}={json.dumps(default)}`"


def _schemas(content: dict[str, Any]) -> Iterator[str]:
    for kind, body in content.items():
        schema = body.get("schema", {})
        named = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema))
        if named:
            yield " or ".join(("list of " if schema.get("type") == "array" else "") + f"`{name}`" for name in named)
        else:
            yield f"`{kind}`"


def options_of_airflow() -> str:
    """The section of Airflow's configuration."""
    from elasticflow_airflow.provider_info import get_provider_info

    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for name, option in get_provider_info()["config"]["elasticflow"]["options"].items():
        default = "" if option["default"] is None else f"`{option['default']}`"
        rows.append(f"| `{name}` | {option['type']} | {default} | {_cell(option['description'])} |")
    return "\n".join(rows)


def commands() -> str:
    """Every command of ``elasticflow`` with every option, as ``--help`` has them."""
    from elasticflow_airflow.cli.main import app

    return "\n\n".join(_described(app, "elasticflow"))


def events() -> str:
    """Return the table of all kinds of event."""
    from elasticflow_airflow.api import EventKind
    from elasticflow_airflow.api.event_data import EVENT_DATA

    rows = ["| kind | meaning | `data` |", "|---|---|---|"]
    for kind in EventKind:
        carries = [f"`{one.name}`" for one in fields(EVENT_DATA[kind])] if kind in EVENT_DATA else []
        rows.append(f"| `{kind}` | {_cell(kind.meaning)} | {', '.join(carries)} |")
    return "\n".join(rows)


def folders() -> str:
    """Return the tree of the folders, each with the first sentence of its package."""
    top = REFERENCE.parents[1]
    roots = (top / "operators", top / "scheduler_core", PACKAGE)
    inits = sorted(init for root in roots for init in root.rglob("__init__.py"))
    rows = ["| folder | contents |", "|---|---|"]
    for init in inits:
        if init.parent.name in ("migrations", "versions"):
            continue
        said = (
            (ast.get_docstring(ast.parse(init.read_text())) or "")
            .split("\n\n")[0]
            .replace("\n", " ")
            .replace("``", "`")
        )
        rows.append(f"| `{init.parent.relative_to(top)}/` | {_cell(said)} |")
    return "\n".join(rows)


def stages_of_a_pass() -> str:
    """Return the table of the loop's stages, in their order."""
    from elasticflow_airflow.service.loop.stages import StageParts, stages

    made = stages(cast(StageParts, None))  # Their names and words alone: none is run.
    rows = [f"| {number} | {one.name} | {one.needs} | {one.gives} |" for number, one in enumerate(made, 1)]
    return "\n".join(["| | stage | input | output |", "|---|---|---|---|", *rows])


def job_states() -> str:
    """Return the table of what may follow each state of a job."""
    from elasticflow_airflow.service.store.transitions import JOB_TRANSITIONS

    return _transitions(JOB_TRANSITIONS)


def generation_states() -> str:
    """Return the table of what may follow each state of a generation."""
    from elasticflow_airflow.service.store.transitions import GENERATION_TRANSITIONS

    return _transitions(GENERATION_TRANSITIONS)


def _transitions(table: Mapping[str, frozenset[str]]) -> str:
    order = list(table)
    rows = ["| state | may be followed by |", "|---|---|"]
    for state, following in table.items():
        names = [f"`{after!s}`" for after in sorted(following - {state}, key=order.index)]
        rows.append(f"| `{state!s}` | {', '.join(names) or 'nothing: final state'} |")
    return "\n".join(rows)


def tones_for_page() -> str:
    """Return the page's module that says how each kind of event looks."""
    from elasticflow_airflow.api import EventKind

    head = ["// How each kind of event looks. Made by `make reference` from EventKind.", "", "export const TONES = {"]
    return "\n".join([*head, *(f"  {kind}: '{kind.tone}'," for kind in EventKind), "};", ""])


def commands_for_airflow() -> str:
    """Return what Airflow's parser has to know of the commands of ``airflow elasticflow``."""
    from elasticflow_airflow.airflow_cli.argparse_bridge import description_of
    from elasticflow_airflow.airflow_cli.commands import SUMMARY, commands

    return description_of("elasticflow", SUMMARY, commands())


def training_options(group: str) -> str:
    """Return the table of a group of what can be asked of a training."""
    from elasticflow_airflow.api.training_options import OPTIONS, REQUIRED

    rows = ["| argument | type | default | meaning |", "|---|---|---|---|"]
    for name, meaning in meanings_of(group).items():
        option = OPTIONS[name]
        shown = "" if option.default is None else f"`{option.default!r}`".replace("'", '"')
        default = "required" if option.default is REQUIRED else option.default_means or shown
        mark = " **T**" if option.template else ""
        kind = _python_type(option.annotation, option.template)
        rows.append(f"| `{name}`{mark} | {kind} | {default} | {_cell(meaning)} |")
    return "\n".join(rows)


def meanings_of(group: str) -> dict[str, str]:
    """Return the text below each option of a group in ``training_options``, in one line each."""
    (found,) = (
        node
        for node in ast.parse((PACKAGE / "api" / "training_options.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == group
    )
    return {
        ast.unparse(option.targets[0]): " ".join(ast.literal_eval(text.value).split())
        for option, text in itertools.pairwise(found.body)
        if isinstance(option, ast.Assign) and isinstance(text, ast.Expr)
    }


def with_parameters(source: str) -> str:
    """Fill in the arguments in the operator's docstring: what each means, without the page's links."""
    from elasticflow_airflow.api.training_options import GROUPS

    parameters = []
    for name, meaning in itertools.chain.from_iterable(meanings_of(group.__name__).items() for group in GROUPS):
        text = re.sub(r" (?:See )?\[[^]]+\]\([^)]+\)\.", "", meaning).replace("`", "``")
        parameters.append(
            textwrap.fill(
                f":param {name}: {text}",
                120,
                initial_indent="    ",
                subsequent_indent="        ",
                break_on_hyphens=False,
            )
        )
    block = "\n".join(parameters) + "\n"
    return re.sub(r"^    :param (?:.+\n)+", lambda _: block, source, count=1, flags=re.MULTILINE)


def _described(app: typer.Typer, path: str) -> Iterator[str]:
    found = {c.name or c.callback.__name__.replace("_", "-"): c.callback for c in app.registered_commands if c.callback}
    for name in sorted(found):
        yield from _command(found[name], f"{path} {name}")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _described(group.typer_instance, f"{path} {group.name or group.typer_instance.info.name}")


def _command(callback: Callable[..., Any], path: str) -> Iterator[str]:
    parameters = get_params_from_function(callback).values()
    arguments = [p.name.upper() for p in parameters if not isinstance(p.default, OptionInfo)]
    yield f"### `{' '.join([path, *arguments])}`"
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(callback) or "")
    yield _cell("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
    options = [p for p in parameters if isinstance(p.default, OptionInfo)]
    asks = {"url", "state_dir"} <= {p.name for p in options}
    rows = [_option_row(p) for p in options if not (asks and p.name in ("url", "state_dir"))]
    if asks:
        yield "Talks to [the service](#which-service): `--url`, `--state-dir`."
    if rows:
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def _option_row(parameter: ParamMeta) -> str:
    information = parameter.default
    assert isinstance(information, OptionInfo)
    kind = _kind(parameter.annotation)
    long = "--" + parameter.name.replace("_", "-")
    if kind == "flag":
        long = f"{long}/--no-{long[2:]}"
    names = ", ".join(f"`{name}`" for name in information.param_decls or (long,))
    default = getattr(information.default, "value", information.default)
    shown = {id(...): "required", id(None): "", id(False): "", id(True): "yes"}.get(id(default), f"`{default}`")
    variable = f" Environment: `{information.envvar}`." if information.envvar else ""
    given = "" if kind == "flag" else f" {kind}"
    return f"| {names}{given} | {shown} | {_cell(' '.join((information.help or '').split()))}{variable} |"


def _kind(annotation: Any) -> str:
    """Say what an option takes."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return " ".join(_kind(one) for one in typing.get_args(annotation))
    if origin is not None:
        (kind,) = {_kind(one) for one in typing.get_args(annotation) if one is not type(None)}
        return f"{kind} ..." if origin is list else kind
    if issubclass(annotation, enum.Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    return {bool: "flag", int: "integer", float: "number", Path: "path"}.get(annotation, "text")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def with_arguments(text: str, page: str) -> str:
    """Fill in, in a page's tables of arguments, what signatures say of each: type, default, template or not.

    Reads the source: Airflow is not needed. A default of None keeps what the page says that it means.
    """
    arguments: dict[str, tuple[str, str]] = {}
    templates: set[str] = set()
    for file, name in CLASSES[page]:
        found, fields = arguments_of(file, name)
        arguments |= found
        templates |= set(fields)

    def fill(row: re.Match[str]) -> str:
        name, cells = row["name"], [cell.strip() for cell in re.split(r"(?<!\\)\|", row["rest"])[:-1]]
        if name == "argument":
            return "| argument | type | default | meaning |\n|---|---|---|---|\n"
        if name not in arguments:
            return row[0]
        annotation, default = arguments[name]
        mark = " **T**" if name in templates else ""
        shown = cells[-2] if default == "None" else _DEFAULTS.get(default, f"`{default}`".replace("'", '"'))
        return f"| `{name}`{mark} | {_python_type(annotation, name in templates)} | {shown} | {cells[-1]} |\n"

    return _ROW.sub(fill, text)


def arguments_of(file: str, name: str) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Return a class's keyword arguments, with annotation and default as written, and its template fields."""
    source = (REFERENCE.parents[1] / file).read_text()
    (found,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    (init,) = (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    arguments = {
        argument.arg: (ast.unparse(argument.annotation or ast.Constant("Any")), ast.unparse(default) if default else "")
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    }
    fields: tuple[str, ...] = ()
    for node in found.body:
        is_fields = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "template_fields"
        if is_fields and node.value is not None:
            fields = tuple(ast.literal_eval(node.value))
    return arguments, fields


def _python_type(annotation: str, is_template: bool) -> str:
    """Write an annotation for a reader: without None, and without the text that any template may be."""
    for abstract, concrete in _CONCRETE.items():
        annotation = annotation.replace(abstract, concrete)
    kinds = [kind for kind in annotation.split(" | ") if kind != "None"]
    if is_template and kinds[-1] == "str" and len(kinds) == 2:
        kinds.remove("str")
    return " or ".join(f"`{kind}`" for kind in kinds)


CLASSES = {
    "authoring.md": (
        ("operators/sensor.py", "ElasticTrainSensor"),
        ("elasticflow_airflow/retry_policies.py", "ElasticFlowRetryPolicy"),
    ),
}
"""Whose arguments a page has tables of."""

_ROW = re.compile(r"^\| `?(?P<name>\w+)`?(?: \*\*T\*\*)? \|(?P<rest>.*\|)\n(?:\|---.*\n)?", re.MULTILINE)
_CONCRETE = {"Sequence[Any]": "list", "Mapping[": "dict["}
_DEFAULTS = {
    "": "required",
    "timedelta(seconds=30)": "30 s",
    "5.0": "5 s",
    "SUCCEEDED": '`"succeeded"`',
    "ElasticFlowHook.default_conn_name": '`"elasticflow_default"`',
}

PARTS: dict[str, Callable[[], str]] = {
    "routes": routes,
    "options": options_of_airflow,
    "commands": commands,
    "events": events,
    "folders": folders,
    "stages": stages_of_a_pass,
    "job-states": job_states,
    "generation-states": generation_states,
    "what-to-train": partial(training_options, "WhatToTrain"),
    "how-much": partial(training_options, "HowMuch"),
    "by-when": partial(training_options, "ByWhen"),
    "how-it-runs": partial(training_options, "HowItRuns"),
}


def files() -> dict[Path, str]:
    """What each page with a generated part, ``openapi.json`` and ``commands.json`` should be."""
    from elasticflow_airflow.service.http.openapi import document

    made = {
        REFERENCE / "openapi.json": json.dumps(document(), indent=1) + "\n",
        PACKAGE / "airflow_cli" / "commands.json": commands_for_airflow(),
        PACKAGE / "ui" / "static" / "event_kinds.js": tones_for_page(),
        OPERATOR: with_parameters(OPERATOR.read_text()),
    }
    for page in (ARCHITECTURE, *sorted(REFERENCE.glob("*.md"))):
        text = page.read_text()
        if _PART.search(text):
            text = made[page] = _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n\n{part[3]}", text)
        if page.name in CLASSES:
            made[page] = with_arguments(text, page.name)
    return made


def outdated() -> list[str]:
    """Return the names of the files that are not what they should be."""
    return [file.name for file, text in files().items() if not file.exists() or file.read_text() != text]


def main() -> None:
    """Write the files, or with ``--check`` say which are outdated."""
    if "--check" in sys.argv[1:]:
        if found := outdated():
            sys.exit(f"outdated: {', '.join(found)}; write them anew with `make reference`")
        return
    for file, text in files().items():
        file.write_text(text)


if __name__ == "__main__":
    main()
