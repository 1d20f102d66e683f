"""What a device can multiply."""

import torch

from baton_engine.config import ConfigError


def check_fp8_if(dtype: torch.dtype, device: torch.device) -> None:
    """Do check_fp8 if codes are of that dtype."""
    if dtype == torch.float8_e4m3fn:
        check_fp8(device)


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if a device has no products of 8-bit floats."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"the weights are in FP8, which needs a GPU of compute capability 8.9 (Ada, Hopper and later); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. It can serve the model in 16 bits, INT8, "
            "4 bits (GPTQ, AWQ, compressed-tensors, MXFP4), or quantized on load by --quantization int8 or int4"
        )
