"""The files for the browser: ours, and the charting library from the ``plotly`` package. Read once, then cached."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Final

CHART_LIBRARY: Final = "vendor/plotly.min.js"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its content, plain and compressed, and an ETag of it."""

    content: bytes
    packed: bytes
    media_type: str
    etag: str


@lru_cache(maxsize=64)
def asset(path: str) -> Asset | None:
    """Return the file of that name, or None. Only files that ship with the package are available."""
    if path == CHART_LIBRARY:
        return _made((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), ".js")
    if path not in _ours():
        return None
    content = files("elasticflow_airflow.ui").joinpath("static", *path.split("/")).read_bytes()
    return _made(content, path[path.rfind(".") :])


def chart_library_version() -> str:
    """Return the version for the library's URL, so that browsers cache the library until it changes."""
    return version("plotly")


@lru_cache(maxsize=1)
def _ours() -> frozenset[str]:
    root = files("elasticflow_airflow.ui") / "static"
    found = {one.name for one in root.iterdir() if one.is_file()}
    found |= {f"{folder.name}/{one.name}" for folder in root.iterdir() if folder.is_dir() for one in folder.iterdir()}
    return frozenset(name for name in found if name[name.rfind(".") :] in _KINDS)


def _made(content: bytes, suffix: str) -> Asset:
    return Asset(
        content=content,
        packed=gzip.compress(content, compresslevel=6, mtime=0),
        media_type=_KINDS[suffix],
        etag=f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    )
