"""The formats that `baton model quantize` writes: what config.json says of each, and how a layer is quantized."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.models.llama import LlamaConfig

from .awq import search_scales
from .codes import Tensors, eight_bit, four_bit_codes, four_bit_scales, pack_four_bit
from .gptq import gptq_codes
from .recording import Site
from .smoothing import apply_fold, averaged_over_heads, folds


class LayerJob(msgspec.Struct, frozen=True):
    """A layer that is to be quantized.

    prefix: of the names of its tensors. layer: its tensors by their full names; those with the names of sites, of norms
    and of biases are float32 on the device that computes. stored: the dtype of the checkpoint. group: inputs that share
    a scale, where the format has groups.
    """

    config: LlamaConfig
    prefix: str
    layer: Tensors
    sites: list[Site]
    stored: torch.dtype
    group: int


class Format(msgspec.Struct, frozen=True):
    """quantize: replaces the weights of all sites in `layer` by the tensors of the format. layout, weights,
    activations: as compressed-tensors describes them. calibrated: the inputs of sites must have been recorded. grouped:
    scales belong to groups of inputs."""

    quantize: Callable[[LayerJob], None]
    layout: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None
    calibrated: bool
    grouped: bool

    def config(self, group: int, ignored: list[str]) -> dict[str, Any]:
        """Return quantization_config of config.json. ignored: the names of linear layers that are not quantized."""
        weights = {**self.weights, "group_size": group} if self.grouped else self.weights
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.layout,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": self.activations}
            },
            "ignore": ignored,
        }


def _eight_bit(kind: torch.dtype) -> Callable[[LayerJob], None]:
    def quantize(job: LayerJob) -> None:
        for site in job.sites:
            for name in site.names:
                _put(job, name, eight_bit(job.layer[f"{name}.weight"], kind, job.stored))

    return quantize


def _gptq(job: LayerJob) -> None:
    for site in job.sites:
        hessian = site.hessian()
        weight = torch.cat([job.layer[f"{name}.weight"] for name in site.names])
        scales = four_bit_scales(weight, job.group, job.stored, hessian.diagonal())
        _put_four_bit(job, site, gptq_codes(weight, hessian, scales), scales)


def _awq(job: LayerJob) -> None:
    for fold in folds(job.config, job.prefix, job.sites):
        site, hessian = fold.site, fold.site.hessian()
        weight = torch.cat([job.layer[f"{name}.weight"] for name in site.names])
        magnitudes = site.magnitudes / max(site.tokens, 1)
        scales = search_scales(weight, hessian, magnitudes, job.group, job.stored, partial(averaged_over_heads, fold))
        site.folded = apply_fold(fold, scales, job.layer, job.stored)
    for site in job.sites:
        weight = torch.cat([job.layer[f"{name}.weight"] for name in site.names])
        importance = site.hessian().diagonal() / site.folded.square()
        scales = four_bit_scales(weight, job.group, job.stored, importance)
        _put_four_bit(job, site, four_bit_codes(weight, scales), scales)


def _put_four_bit(job: LayerJob, site: Site, codes: torch.Tensor, scales: torch.Tensor) -> None:
    outputs = [len(job.layer[f"{name}.weight"]) for name in site.names]
    parts = zip(site.names, torch.split(codes, outputs), torch.split(scales, outputs), strict=True)
    for name, codes_of, scales_of in parts:
        _put(job, name, pack_four_bit(codes_of, scales_of))


def _put(job: LayerJob, name: str, tensors: Tensors) -> None:
    del job.layer[f"{name}.weight"]
    job.layer.update({f"{name}.{field}": tensor for field, tensor in tensors.items()})


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def _by_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


FORMATS = {
    "fp8": Format(
        _eight_bit(torch.float8_e4m3fn), "float-quantized",
        _weights(8, "float", "channel"), _by_token("float"), calibrated=False, grouped=False,
    ),
    "int8": Format(
        _eight_bit(torch.int8), "int-quantized",
        _weights(8, "int", "channel"), _by_token("int"), calibrated=False, grouped=False,
    ),
    "int4-awq": Format(
        _awq, "pack-quantized", _weights(4, "int", "group"), None, calibrated=True, grouped=True
    ),
    "int4-gptq": Format(
        _gptq, "pack-quantized", _weights(4, "int", "group", actorder="weight"), None, calibrated=True, grouped=True
    ),
}  # fmt: skip

_GROUPS = (128, 64, 32)


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"--format {name!r} is unknown; use {', '.join(FORMATS)}")
    return FORMATS[name]


def choose_group(requested: int, inputs: dict[str, int]) -> int:
    """Return how many inputs share a scale. requested: 0 = the largest size that divides the inputs of all projections.

    inputs: of each projection. Raises ConfigError if a projection has no such groups.
    """
    if requested and requested not in _GROUPS:
        raise ConfigError(f"--group-size {requested} is not served; use {', '.join(map(str, _GROUPS))}, or 0")
    sizes = (requested,) if requested else _GROUPS
    for size in sizes:
        if not any(count % size for count in inputs.values()):
            return size
    name, count = next((name, count) for name, count in inputs.items() if count % sizes[-1])
    raise ConfigError(
        f"{name} has {count} inputs, which are not groups of {sizes[-1]}; use another --group-size, or --format int8 "
        "or fp8"
    )
