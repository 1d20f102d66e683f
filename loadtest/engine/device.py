"""The device of this process: the GPU if there is one, else the CPU."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    """bandwidth: bytes/s read and written. arithmetic: dense matrix-product operations/s in the model's dtype."""

    bandwidth: float
    arithmetic: float

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e12:.2f} TB/s, {self.arithmetic / 1e12:.1f} TFLOP/s"


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def itemsize() -> int:
    """Return the bytes of a weight on this device: bfloat16 on a GPU, float32 on a CPU."""
    return 2 if on_gpu() else 4


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished all submitted work."""
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def describe() -> dict[str, Any]:
    """Return name and size of the device, as a report states them."""
    import torch

    if not on_gpu():
        return {"name": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": _nvidia("driver_version"),
        "power_limit": _nvidia("power.limit"),
        "cuda": torch.version.cuda,
    }


def _nvidia(field: str) -> str | None:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def measure_card() -> Card:
    """Return the rates of a large copy and of a large matrix product on this device, in short bursts."""
    import torch

    gpu = on_gpu()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    source = torch.ones((4 << 30) if gpu else (32 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = 20 if gpu else 3
    copying = _seconds(lambda: target.copy_(source), calls)
    size = 8192 if gpu else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    multiplying = _seconds(lambda: a @ b, calls)
    return Card(2 * source.numel() / copying, 2 * size**3 / multiplying)


def _seconds(action: Callable[[], object], calls: int) -> float:
    """Return the seconds of one of several calls that follow each other at once, in the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        action()
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        synchronize()
        best = min(best, (time.perf_counter() - start) / calls)
    return best
