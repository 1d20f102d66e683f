"""The norm of groups of channels that ranks divide among them."""

import torch

from baton_engine.shard import Ranks, even_part
from baton_engine.source import Source

from .norm import RmsNorm


class GroupedNorm:
    """A norm of each of `groups` equal parts of `size` channels."""

    def __init__(self, source: Source, size: int, eps: float, groups: int, ranks: Ranks) -> None:
        self._ranks, self._groups = ranks, groups
        self._norm = RmsNorm(source, size, eps, part=even_part(size, ranks, "channels"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of each group in the engine's dtype. x: [T, channels of this rank] float32."""
        ranks, groups, norm = self._ranks, self._groups, self._norm
        grouped = torch.unflatten(x, 1, (max(groups // ranks.count, 1), -1))
        mean = grouped.square().mean(dim=2)
        if groups < ranks.count:
            # Several ranks have the channels of a group.
            means, own = mean.new_zeros(len(x), groups), ranks.rank * groups // ranks.count
            means[:, own : own + 1] = mean
            mean = ranks.sum(means)[:, own : own + 1] / (ranks.count // groups)
        scaled: torch.Tensor = (grouped * torch.rsqrt(mean + norm.eps)[:, :, None]).flatten(1)
        return scaled.to(norm.weight.dtype) * norm.weight
