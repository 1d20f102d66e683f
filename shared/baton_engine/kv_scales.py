"""The scales of a KV cache in 8 bits."""

import hashlib

import torch

from baton_kernels.reference.quantize import E4M3_MOST

from .config import ConfigError
from .shard import Ranks

# Measured scales leave room for values this many times as large as the largest measured one.
_ROOM = 2.0
# Keeps the reciprocals of scales finite.
_MOST_EXPONENT = 60


class KvScales:
    """For each layer the scale of each head's keys, then of its values, [2, kv_heads] float32, and their reciprocals.

    They begin as 1. The tensors are never replaced, as CUDA graphs keep their addresses. Each layer has its own
    tensors, so that all addresses have the same alignment, for which Triton compiles a kernel once. With several ranks,
    each has the scales of its own heads here, and those of all heads for the digest.
    """

    def __init__(self, layers: int, kv_heads: int, device: torch.device) -> None:
        self._scales = [torch.ones(2, kv_heads, device=device) for _ in range(layers)]
        self._inverses = [scales.clone() for scales in self._scales]
        self._of_all_heads = [scales.cpu() for scales in self._scales]

    def __len__(self) -> int:
        return len(self._scales)

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._scales[layer]

    def inverses(self, layer: int) -> torch.Tensor:
        return self._inverses[layer]

    def set(self, layer: int, scales: torch.Tensor, own: slice) -> None:
        """Set the scales of a layer. scales: of all heads of the model, [2, heads]. own: the heads of this cache.

        Raises ConfigError for a scale that is not a number above 0.
        """
        scales = scales.float()
        inverses = 1 / scales
        if not bool((scales.isfinite() & inverses.isfinite() & (scales > 0)).all()):
            raise ConfigError(f"a scale for KV in FP8 of layer {layer} is not a number above 0: {scales.tolist()}")
        self._of_all_heads[layer] = scales.cpu()
        self._scales[layer].copy_(scales[:, own])
        self._inverses[layer].copy_(inverses[:, own])

    @property
    def digest(self) -> str:
        """A digest of the scales of all heads, which is the same on all ranks."""
        numbers = torch.stack(self._of_all_heads).numpy()
        return hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()


def scales_for(largest: torch.Tensor) -> torch.Tensor:
    """Return scales for values whose largest magnitudes are given: powers of two.

    A power of two costs no precision, as codes are floats. And magnitudes that differ only in their last digits,
    because of another order of additions, mostly give the same scale.
    """
    wanted = largest.float() * (_ROOM / E4M3_MOST)
    _, exponents = torch.frexp(wanted)
    # frexp gives 1/2 <= mantissa < 1, so that a power of two gets the next larger one.
    powers = torch.ldexp(torch.ones_like(wanted), exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT))
    return torch.where(wanted > 0, powers, 1.0)


def join_heads(scales: list[torch.Tensor], heads: int, ranks: Ranks) -> list[torch.Tensor]:
    """Return the scales of all heads, [2, heads] for each layer, the same on all ranks.

    scales: those of this rank's heads. Where several ranks have the same head, the scale of the first of them counts.
    """
    joined = ranks.join(torch.cat(scales))
    return list(joined[:, :: joined.shape[1] // heads].reshape(len(scales), 2, heads))
