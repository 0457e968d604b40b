"""Where ``job_files/unpacking.py`` was once: a daemon of such a release, not started again yet, runs it by its path.

Run with ``-I -S``: the standard library only, and nothing of the project can be imported.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "job_files" / "unpacking.py"), run_name="__main__")
