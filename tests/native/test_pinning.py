"""Threads that stay on a core each, by choice."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from specinfer.attention import Span
from specinfer.errors import ConfigError
from specinfer.runtime import Batch, WorkItem
from specinfer.runtime.cores import one_per_core
from specinfer.runtime.native import PIN_VARIABLE, extension

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by the system's own records")
NUM_THREADS = 5
"""Of a pool that no other test shares."""


def homes() -> set[str]:
    """The processors that each of this process's threads may run on, where it is one alone."""
    found = set()
    for status in Path("/proc/self/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        allowed = fields["Cpus_allowed_list"].strip()
        found |= {allowed} if allowed.isdigit() else set()
    return found


def test_each_thread_has_a_core(tiny_model, runners, monkeypatch) -> None:  # noqa: ANN001
    cores = [str(processor) for processor in one_per_core()][:NUM_THREADS]
    if len(cores) == 1:
        pytest.skip("one core")
    batch = Batch.of(
        [WorkItem(Span(np.zeros(0, np.int64), np.arange(9), np.arange(-1, 8)), np.arange(9), np.arange(9))]
    )
    expected = runners.native(tiny_model, num_threads=NUM_THREADS).run(batch)[0]
    assert not homes() & set(cores[1:])
    monkeypatch.setenv(PIN_VARIABLE, "1")
    pinned = runners.native(tiny_model, num_threads=NUM_THREADS)
    assert homes() >= set(cores[1:])
    assert cores[0] not in homes()  # the caller's, which goes where it likes
    assert pinned.run(batch)[0].equal(expected)


def test_what_cannot_be_is_said(tiny_model, runners, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setenv(PIN_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="SPECINFER_PIN is 'yes'"):
        runners.native(tiny_model)
    with pytest.raises(ValueError, match="processor 100000"):
        extension().pin(NUM_THREADS, [0, 100000])
