"""Scales for KV in FP8 that are stored: in a checkpoint, as compressed-tensors and the tools around vLLM write them, or
in a safetensors file of their own with the same names."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .config import ConfigError
from .config_file import ConfigFile
from .kv_scales import KvScales
from .loading import PLAIN, Weights, dtype_name
from .quantization.fields import quantization_of
from .read_ahead import Range

# The names behind that of an attention layer, for keys and for values. Newer tools come first.
_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
_PLACE = re.compile(r"(?:^|.*\.)(\d{1,6})\.(?:self_attn|attn|attention|self_attention)\.(.+)")
_LARGEST_FILE = 16 << 20


class StoredScales:
    """Scales that are stored for each layer.

    where: in words. names: of each layer, the tensors of its keys and of its values. ranges: where these tensors lie in
    a checkpoint, in the order in which they are read.
    """

    def __init__(
        self, where: str, names: list[tuple[str, str]], take: Callable[[str], torch.Tensor], ranges: list[Range]
    ) -> None:
        self.where, self.ranges = where, ranges
        self._names, self._take = names, take

    def read(self, heads: int) -> list[torch.Tensor]:
        """Return the scales of each layer, [2, heads]. heads: those of the whole model.

        Raises ConfigError for a tensor that holds no scales for so many heads.
        """
        found = []
        for names in self._names:
            read = {name: self._heads(name, heads) for name in dict.fromkeys(names)}
            found.append(torch.stack([read[name] for name in names]))
        return found

    def _heads(self, name: str, heads: int) -> torch.Tensor:
        """Return [heads]: a scale for each head, or the one of all heads."""
        tensor = self._take(name)
        if tensor.numel() not in (1, heads) or tensor.dtype not in PLAIN:
            shape = list(tensor.shape)
            raise ConfigError(
                f"{name}, {dtype_name(tensor.dtype)} {shape}, is neither one scale nor one for each of {heads} heads"
            )
        return tensor.flatten().expand(heads)


def scales_of_checkpoint(folder: Path, weights: Weights, layers: int) -> StoredScales | None:
    """Return the scales of a model folder's weights; None if some layer has none, or if they are for other codes than
    those of float8_e4m3fn."""
    names = _find(weights.names, layers)
    if names is None or not _are_for_e4m3(ConfigFile.read(folder).fields):
        return None

    def take(name: str) -> torch.Tensor:
        return weights.take(name, weights.stored_shape(name), None, weights.stored_dtype(name))

    each = [name for pair in names for name in dict.fromkeys(pair)]
    ranges = [weights.range(name, weights.stored_shape(name), None, weights.stored_dtype(name)) for name in each]
    return StoredScales("those of the checkpoint", names, take, ranges)


def scales_of_file(path: Path, layers: int) -> StoredScales:
    """Return the scales of a file as `save_scales` writes it. Raises ConfigError when it cannot be used."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"--kv-scales {path} has more than {_LARGEST_FILE >> 20} MiB, which scales never need")
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--kv-scales {path} cannot be read as a safetensors file: {error}") from None
    names = _find(tensors, layers)
    if names is None:
        raise ConfigError(f"--kv-scales {path} lacks the scales of some of the model's {layers} layers")
    return StoredScales(f"those of {path.name}", names, tensors.__getitem__, [])


def save_scales(scales: KvScales, path: Path) -> None:
    """Write scales to a safetensors file, one for each head."""
    names = _NAMES[0]
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": scale.cpu().clone()
        for layer in range(len(scales))
        for name, scale in zip(names, scales[layer], strict=True)
    }
    save_file(tensors, path)


def _find(names: Iterable[str], layers: int) -> list[tuple[str, str]] | None:
    """Return for each layer the names of the tensors that hold the scales of its keys and of its values."""
    found: dict[tuple[int, str], str] = {}
    for name in names:
        match = _PLACE.fullmatch(name)
        if match is not None:
            found[int(match[1]), match[2]] = name
    for keys, values in _NAMES:
        if all((layer, name) in found for layer in range(layers) for name in (keys, values)):
            return [(found[layer, keys], found[layer, values]) for layer in range(layers)]
    return None


def _are_for_e4m3(config: dict[str, Any]) -> bool:
    """config: the fields of config.json."""
    quantization = quantization_of(config)
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if not isinstance(scheme, dict):
        return True
    return (scheme.get("type", "float"), scheme.get("num_bits", 8)) == ("float", 8)
