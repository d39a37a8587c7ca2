"""A distillation small enough for a test: a tiny random target, short prompts, short answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specinfer.distill import boost, distillation
from specinfer.distill.distillation import Distillation
from specinfer.distill.settings import DistillSettings

SETTINGS = {
    "max_tokens": 12,
    "size": "0.2m",
    "vocab_size": 280,
    "num_epochs": 3,
    "batch_tokens": 512,
    "max_num_seqs": 8,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 prompts, of which each part has some."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n} in words."}], "kind": "say"} for n in range(40)
    ]
    rows += [{"prompt": f"{n} is more than"} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


Distil = Callable[..., Distillation]


@pytest.fixture(scope="session")
def distil(tiny_model: Path, prompts: Path) -> Distil:
    """distil(directory, data=None, **changes): a distillation that has not begun."""

    def make(directory: Path, data: Path | None = None, **changes: object) -> Distillation:
        values = {"target": str(tiny_model), "prompts": prompts, **SETTINGS, **changes}
        return Distillation(DistillSettings(**values), directory, data, quiet=True)

    return make


@pytest.fixture(scope="session", autouse=True)
def few_measurements() -> Iterator[None]:
    """Judging takes as long as there are prompts to time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "NUM_JUDGED_PROMPTS", 1)
        patch.setattr(boost, "NUM_TIMED", 3)
        yield


@pytest.fixture(scope="session")
def finished(
    distil: Distil, tmp_path_factory: pytest.TempPathFactory, few_measurements: None
) -> Distillation:
    """One that ran to its end undisturbed."""
    whole = distil(tmp_path_factory.mktemp("finished") / "draft")
    whole.run()
    return whole
