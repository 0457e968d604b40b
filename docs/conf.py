"""How Sphinx builds these pages: ``make docs``. Which page comes where; everything else is in the pages themselves.

The pages are plain Markdown, so that they read well in a checkout too. What only Sphinx needs is added here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from elasticflow_airflow import __version__  # noqa: E402

project = "elasticflow-airflow"
author = "The elasticflow-airflow developers"
copyright = author  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "examples"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True

html_theme = "furo"
html_title = f"elasticflow-airflow {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f7a4d", "color-brand-content": "#1f7a4d"},
    "dark_css_variables": {"color-brand-primary": "#6fcf97", "color-brand-content": "#6fcf97"},
}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

NAVIGATION = {
    "Tutorial": ["tutorial/first-dag"],
    "How to": [
        # Begin
        "how-to/install",
        "how-to/migrate",
        "how-to/choose-how-to-write",
        "how-to/elastic-training-script",
        "how-to/transformers-trainer",
        "how-to/lightning",
        "how-to/plain-torchrun-script",
        "how-to/gpus",
        "how-to/requirements",
        # DAGs
        "how-to/deadlines",
        "how-to/write-dags",
        "how-to/retrain-from-yesterday",
        "how-to/model-registry",
        "how-to/wait-for-a-training",
        "how-to/alerts",
        "how-to/test-your-dags",
        "how-to/*",
        # The cluster
        "how-to/run-the-service",
        "how-to/several-machines",
        "how-to/ray",
        "how-to/kuberay",
        "how-to/slurm",
        "how-to/deploy",
        "how-to/replicas",
        "how-to/monitor",
        "how-to/watch-the-cluster",
        "how-to/forecast",
        "how-to/feed-the-calendar",
        "how-to/autoscale",
        "how-to/size-a-cluster",
        "how-to/compare-policies-on-your-own-trace",
    ],
    "Reference": [
        "reference/operator",
        "reference/authoring",
        "reference/runtime",
        "reference/configuration",
        "reference/cli",
        "reference/api",
        "reference/*",
    ],
    "Explanation": [
        "explanation/deadlines-and-promises",
        "explanation/how-a-task-becomes-a-job",
        "explanation/the-same-weights",
        "explanation/architecture",
        "explanation/*",
    ],
}
"""The four kinds, in order. A pattern takes the pages of its folder that are not named."""


def pages_of(kind: str) -> list[str]:
    """Return the pages of one kind in order: those named, and where its pattern stands those that are not."""
    entries = NAVIGATION[kind]
    pages: list[str] = []
    for entry in entries:
        if not entry.endswith("*"):
            if (DOCS / f"{entry}.md").exists():
                pages.append(entry)
            continue
        found = sorted(str(file.relative_to(DOCS).with_suffix("")) for file in DOCS.glob(f"{entry}.md"))
        pages += [page for page in found if page not in entries]
    return pages


def short_title(page: str) -> str:
    """Return the title of a page, without the words that all how-to guides begin with."""
    title = (DOCS / f"{page}.md").read_text().split("\n", 1)[0].removeprefix("# ")
    short = title.removeprefix("How to ")
    return short[0].upper() + short[1:]


def add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """Add to the first page the lists from which Sphinx makes the navigation."""
    if name != "index":
        return
    for kind in NAVIGATION:
        pages = "\n".join(f"{short_title(page)} <{page}>" for page in pages_of(kind))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {kind}\n\n{pages}\n```\n"


def offer_results(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Let the site offer the files of results, which are no pages of it, for download."""
    source[0] = re.sub(r"\]\((?=[./]+/benchmarks/results/)", "](path:", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", offer_results)
    app.add_lexer("csv", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
