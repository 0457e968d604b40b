"""Real workers on a real GPU; everything here is skipped, and says so, where there is none.

All of it needs one GPU: workers that share it send through the host's memory, by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gang import Gang

SCRIPT = Path(__file__).parents[1] / "support" / "train_small.py"
EPOCHS = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false"))


@pytest.fixture
def gpu_gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Make a job whose workers all see the first GPU. ``model`` is one of support/train_small.py's."""
    made: list[Gang] = []

    def make(
        model: str = "convolution", *, step_s: float = 0.0, env: dict[str, str] | None = None, **config: Any
    ) -> Gang:
        options = {"epochs": EPOCHS, "global_batch_size": 16, "logical_workers": 8, **config}
        settings = {"TEST_MODEL": model, "TEST_STEP_S": str(step_s), "GLOO_SOCKET_IFNAME": "lo"}
        made.append(Gang(tmp_path / f"gang{len(made)}", SCRIPT, settings, imports=None, **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


@pytest.fixture
def weights_of() -> Callable[[Gang], str]:
    """The digest of the final weights, the same from all workers that came to the end."""

    def find(gang: Gang) -> str:
        digests = {line.split()[1] for line in gang.output() if line.startswith("WEIGHTS")}
        assert len(digests) == 1, gang.story()
        return digests.pop()

    return find


@pytest.fixture
def train(gpu_gang: Callable[..., Gang], weights_of: Callable[[Gang], str]) -> Callable[..., str]:
    """Train to the end with so many workers from the beginning; the digest of the weights."""

    def run(workers: int, model: str = "convolution", **options: Any) -> str:
        gang = gpu_gang(model, **options)
        gang.plan(*(f"w{rank}" for rank in range(workers)))
        assert set(gang.finish().values()) == {0}, gang.story()
        return weights_of(gang)

    return run
