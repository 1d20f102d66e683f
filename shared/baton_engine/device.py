"""Selects the device that an engine runs on, and the dtype of its model."""

import torch

from .config import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_device(name: str) -> torch.device:
    """Return the device of this name. A GPU always has an index, as torch cannot make a device without one current.

    name: auto = a GPU if there is one. Raises ConfigError.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name!r}: this machine has no CUDA device that torch can use")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(requested: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the model. auto is float32 on CPU, where half precision is slower, and the checkpoint's own
    elsewhere."""
    name = requested
    if requested == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
