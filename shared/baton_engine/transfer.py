"""Copies small data between host and device without waiting for the work that is queued on the device."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch


def to_device(
    values: Sequence[int] | Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return values as a tensor on the device.

    From pinned memory the copy is queued like a kernel; from ordinary memory it would wait for all that is queued.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized host memory for asynchronous copies to or from the device."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host that will hold values once the work queued on the device is done."""
    return host_buffer(values.shape, values.dtype, values.device).copy_(values, non_blocking=True)


def pack_to_device(parts: Sequence[np.ndarray | list[int]], device: torch.device) -> list[torch.Tensor]:
    """Return each part as int32 on the device. All are copied at once, as the fixed cost of a copy is the largest."""
    # Each begins at a multiple of 16 bytes: Triton compiles a kernel again for pointers of another alignment.
    starts = list(itertools.accumulate((-(-len(part) // 4) * 4 for part in parts), initial=0))
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, part in zip(starts, parts, strict=False):
        packed[start : start + len(part)] = part
    together = to_device(packed, device, torch.int32)
    return [together[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]
