"""Kernels that only Hopper runs are compiled elsewhere, as no interpreter runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="it runs on Hopper only")


def compiled_sizes(kernel: str) -> list[int]:
    """Return how many bytes of code a kernel's variants have, as compile_hopper names it."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_hopper", kernel],
        capture_output=True, text=True, env=environment, cwd=root, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    sizes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return sizes
