"""Old location of ``job_files/unpacking.py``: a daemon of an earlier release that still runs starts it by this path.

Run with ``-I -S``: the standard library only, and nothing of the project can be imported.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "job_files" / "unpacking.py"), run_name="__main__")
