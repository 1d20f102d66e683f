"""Small host data to the device without waiting for what the device is doing."""

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
