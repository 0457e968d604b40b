"""``plain.py STEPS FOLDER``: counts, slowly until FOLDER holds ``hurry``. It knows nothing of us, and cannot resume."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STEP_S = 0.2
hurry = Path(sys.argv[2]) / "hurry"

print("begins in process", os.getpid(), flush=True)
for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.002 if hurry.exists() else STEP_S)
    print("step", step, flush=True)
print("ends in process", os.getpid(), flush=True)
