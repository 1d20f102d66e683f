"""The dtype of a model's KV: that of its activations, or 8 bits."""

import torch

from .config import ConfigError
from .latent_spec import LatentSpec
from .model_config import ModelConfig

FP8 = torch.float8_e4m3fn


def choose_kv_dtype(requested: str, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV. requested: as --kv-cache-dtype. dtype: of activations.

    Raises ConfigError for a model whose KV is not kept in the dtype that was requested.
    """
    if requested == "auto":
        return dtype
    if requested != "fp8":
        raise ConfigError(f"--kv-cache-dtype {requested!r} is unknown; use auto or fp8")
    instead = "use --kv-cache-dtype auto, which keeps the KV in the dtype of the activations"
    if any(isinstance(spec, LatentSpec) for spec in model.attention):
        raise ConfigError(
            f"--kv-cache-dtype fp8 is for keys and values, but the cache of {model.architecture} holds latent vectors: "
            f"{instead}"
        )
    if len(model.kv_layout(model.dtype).planes) > 2:
        raise ConfigError(
            f"--kv-cache-dtype fp8 is for keys and values, but the cache of {model.architecture} also holds index "
            f"keys: {instead}"
        )
    if model.recent_tokens > 1:
        raise ConfigError(
            f"--kv-cache-dtype fp8 is for keys and values, but the cache of {model.architecture} also holds the inputs "
            f"of convolutions or recurrent states: {instead}"
        )
    # Scales are of the heads of planes.
    if model.kv_layout(model.dtype).heads:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs the same heads in all layers, which {model.architecture} does not have: "
            f"{instead}"
        )
    # KV is moved in words of 32 bits.
    for name, dim in (("head_dim", model.head_dim), ("v_head_dim", model.value_dim)):
        if dim % 4:
            raise ConfigError(
                f"--kv-cache-dtype fp8 needs a {name} that is a multiple of 4, this model has {dim}: {instead}"
            )
    return FP8


def check_fp8_kv(device: torch.device) -> None:
    """Raise ConfigError if kernels of a device have no 8-bit floats."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper and later); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor} and serves with --kv-cache-dtype auto"
        )
