"""Selects the attention backend of an engine. The runner of the device creates it."""

import logging
from importlib import import_module
from typing import cast

import torch

from baton_engine.attention_spec import AttentionSpec, KeyBlockSpec
from baton_engine.compressed_spec import CompressedSpec
from baton_engine.config import ConfigError
from baton_engine.latent_spec import IndexedLatentSpec, LatentSpec, latent_specs
from baton_engine.model_config import ModelConfig

from .backend import AttentionBackend

log = logging.getLogger(__name__)

# For each kind of attention, the module in this package and the class in it, by the names of the backends. A module is
# imported when its backend is made, as a CPU has no Triton.
_BACKENDS: dict[type[AttentionSpec], dict[str, tuple[str, str]]] = {
    AttentionSpec: {
        "hopper": ("hopper_paged", "HopperPaged"),
        "triton": ("triton_paged", "TritonPaged"),
        "torch_sdpa": ("torch_sdpa", "TorchSdpa"),
    },
    LatentSpec: {"triton": ("triton_latent", "TritonLatent"), "torch_sdpa": ("torch_latent", "TorchLatent")},
    KeyBlockSpec: {
        "triton": ("triton_key_blocks", "TritonKeyBlocks"),
        "torch_sdpa": ("torch_key_blocks", "TorchKeyBlocks"),
    },
    IndexedLatentSpec: {"triton": ("triton_indexed", "TritonIndexed"), "torch_sdpa": ("torch_indexed", "TorchIndexed")},
    CompressedSpec: {
        "triton": ("triton_compressed", "TritonCompressed"),
        "torch_sdpa": ("torch_compressed", "TorchCompressed"),
    },
}
# Those for models whose layers have several kinds of latent attention.
_OF_SEVERAL_LATENTS = {
    "triton": ("triton_latents_by_layer", "TritonLatentsByLayer"),
    "torch_sdpa": ("torch_latents_by_layer", "TorchLatentsByLayer"),
}
# The largest head_dim for which tiles of keys and values fit into shared memory, and that on GPUs with 227 KiB of it,
# by their major capability. The kernel for Hopper has tiles for the former alone.
_LARGEST_HEAD, _LARGEST_HEAD_OF_LARGE_GPUS = 256, 512
_LARGE_GPUS = (9, 10)
_LEAST_CAPABILITY = (8, 0)  # needed for bf16 products
_HOPPER_BLOCK = 64  # tokens of a block, one or two of which are a tile of keys
# The dtypes of KV that the kernel for Hopper takes, by the dtype of activations. It reads copies in 16 bits of codes.
# In float16 a code and its scale may give more than the largest number.
_HOPPER_KV = {torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn), torch.float16: (torch.float16,)}


def select_backend(
    name: str,
    config: ModelConfig,
    device: torch.device,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> str:
    """Return `name`, or with "auto" that of the best backend for this model and device, and log the reason.

    deterministic: a sequence's result must not depend on the others of its step. dtype: of activations. kv_dtype: of
    the numbers or codes in the cache. block_size: in tokens. Raises ConfigError, which names the backends that can run
    the model, for a backend that cannot.
    """
    # In the order in which "auto" tries them.
    refusals = {
        "hopper": _why_not_hopper(config, device, deterministic, dtype, kv_dtype, block_size),
        "triton": _why_not_triton(config, device),
        "torch_sdpa": "--deterministic rules it out, as its results depend on the batch" if deterministic else None,
    }
    usable = [backend for backend, refusal in refusals.items() if refusal is None]
    if not usable:
        why = "; ".join(f"{backend}: {refusal}" for backend, refusal in refusals.items())
        raise ConfigError(f"no attention backend can run this model here ({why})")
    chosen = usable[0] if name == "auto" else name
    if chosen not in refusals:
        raise ConfigError(f"attention backend {name!r} is unknown; use auto or {' or '.join(usable)}")
    if refusals[chosen] is not None:
        raise ConfigError(
            f"attention backend {name!r} cannot run this model here: {refusals[chosen]}; use {' or '.join(usable)}"
        )
    reasons = {
        "hopper": "reads the paged cache in place, with chunks through a kernel written for this GPU",
        "triton": "reads the paged cache in place, as its tiles fit this GPU",
        "torch_sdpa": f"runs everywhere ({'triton: ' + refusals['triton'] if refusals['triton'] else 'slower'})",
    }
    reason = reasons[chosen] if name == "auto" else "requested"
    log.info("attention backend %s: %s", chosen, reason, extra={"event": "attention_backend", "backend": chosen})
    return chosen


def backend_class(name: str, config: ModelConfig) -> type[AttentionBackend]:
    """Return the class of a backend that `select_backend` has returned for the model."""
    module, kind = _modules(config)[name]
    return cast(type[AttentionBackend], getattr(import_module(f".{module}", __package__), kind))


def _modules(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Return the backends for the kind of attention that layers have, as in _BACKENDS. Layers may also have the plain
    kind."""
    if len(latent_specs(config.attention)) > 1:
        return _OF_SEVERAL_LATENTS
    kinds = {type(spec) for spec in config.attention}
    [kind] = kinds - {AttentionSpec} or kinds
    return _BACKENDS[kind]


def _why_not_hopper(
    config: ModelConfig,
    device: torch.device,
    deterministic: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
) -> str | None:
    if not _is_hopper(device):
        return "it needs a Hopper GPU"
    if "hopper" not in _modules(config) or any(spec.alibi is not None for spec in config.attention):
        return "it has no latent attention, no selected blocks of keys, no compressed attention and no ALiBi"
    if deterministic:
        return "--deterministic rules it out, as tiles with a mask and without are rounded in different ways"
    if kv_dtype not in _HOPPER_KV.get(dtype, ()):
        names = (str(each).removeprefix("torch.") for each in (kv_dtype, dtype))
        return "it needs KV of 16 bits, or in FP8 in a model in bfloat16, this is {} in {}".format(*names)
    if block_size != _HOPPER_BLOCK:
        return f"it needs --block-size {_HOPPER_BLOCK}, this is {block_size}"
    unfit = [dim for dim in config.head_dims if dim > _LARGEST_HEAD or dim % 8]
    if unfit:
        return f"heads of {unfit[0]} do not fit its tiles"
    if config.kv_layout(config.dtype).heads:
        return "it has no layers with heads of their own"
    if config.value_dim != config.head_dim:
        return "it has no values of another size than keys"
    return None


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _why_not_triton(config: ModelConfig, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY[0]}.0, this GPU has {capability[0]}.{capability[1]}"
    widest = max(*config.head_dims, config.value_dim)
    if widest > (_LARGEST_HEAD_OF_LARGE_GPUS if capability[0] in _LARGE_GPUS else _LARGEST_HEAD):
        return f"heads of {widest} do not fit its tiles"
    return None
