"""What is used of a task's log."""

from __future__ import annotations

from typing import Any, Protocol


class Logger(Protocol):
    """The part of a task's logger that is used (Airflow's is no logging.Logger)."""

    def info(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what happens."""
        ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what somebody should look at."""
        ...

    def exception(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what went wrong, with its traceback."""
        ...
