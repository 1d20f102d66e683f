"""Decode steps of a tiny shape are timed beside their bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.engine import decode_bench

pytestmark = pytest.mark.processes


def test_each_batch_has_its_time_and_its_bound(shape: Path) -> None:
    command = [sys.executable, decode_bench.__file__, str(shape), "--batches", "1,3", "--context", "40"]
    command += ["--repeats", "3", "--bandwidth", "0.001"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heading, one, three, _, _ = done.stdout.split("\n", 4)
    assert heading.split() == ["tiny", "ms", "bound", "ms", "%", "of", "bound"]
    cells = {tuple(line.split()[:2]): line.split()[2:] for line in (one, three)}
    assert list(cells) == [("batch", "1"), ("batch", "3")]
    for median, spread, bound, share in cells.values():
        least, most = map(float, spread.strip("()").split("-"))
        assert 0 < least <= float(median) <= most
        assert int(share.strip("%")) == pytest.approx(float(bound) / float(median) * 100, rel=0.05, abs=1)
    # Weights are read once, and the KV of each sequence.
    assert float(cells["batch", "1"][2]) < float(cells["batch", "3"][2]) < 2 * float(cells["batch", "1"][2])


def test_a_shape_that_fails_fails_the_run(shape: Path) -> None:
    command = [sys.executable, decode_bench.__file__, str(shape), "--context", "400"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "tiny failed" in done.stderr
