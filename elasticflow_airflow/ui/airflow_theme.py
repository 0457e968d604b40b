"""The brand colour of Airflow's own pages, as its configuration names it (``[api] theme``, since Airflow 3.2)."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException

_SHADES = ("100", "300", "700", "900", "950")
_COLOUR = re.compile(r"oklch\([0-9.]{1,12} [0-9.]{1,12} [0-9.]{1,12}\)|#[0-9a-fA-F]{6}")
"""What Airflow accepts there, and nothing that could end a rule of a style sheet."""


@cache
def brand_colours() -> dict[str, str] | None:
    """Return the shades of the brand colour that the page uses, by their numbers; None if no brand colour is set."""
    try:
        theme: Any = conf.getjson("api", "theme", fallback=None)
    except AirflowConfigException:  # It is no JSON: Airflow's own pages say so.
        return None
    for key in ("tokens", "colors", "brand"):
        theme = theme.get(key) if isinstance(theme, dict) else None
    if not isinstance(theme, dict):
        return None
    shades = {number: shade.get("value") for number in _SHADES if isinstance(shade := theme.get(number), dict)}
    known = {number: value for number, value in shades.items() if isinstance(value, str) and _COLOUR.fullmatch(value)}
    return known if len(known) == len(_SHADES) else None
