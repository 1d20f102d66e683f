"""Hyper-connections: several residual streams in place of one (Zhu et al., "Hyper-Connections", 2024).

The streams of a token lie one after another in a row, [T, streams * hidden]. All ranks compute the same.
"""

from typing import NamedTuple

import torch

from baton_engine.source import Source


class Mixing(NamedTuple):
    """streams: how many there are. eps: of the norm of a token's streams. gate_eps: added to each gate. magnitude: the
    bound of the gates with which a block's result is added to the streams."""

    streams: int
    eps: float
    gate_eps: float
    magnitude: float


class StreamGates:
    """Gates that are computed from all streams of a token, in float32: sigmoid(W x / rms(x) * scale + base).

    source: of tensors whose names are `prefix` and then fn, base or scale. kinds: each stream has a gate of each kind,
    and each kind a scale.
    """

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing, kinds: int) -> None:
        self._ops, self._eps = source.ops, mixing.eps
        count, size, wide = kinds * mixing.streams, mixing.streams * hidden, torch.float32
        self._weight = source.take(f"{prefix}fn", (count, size), dtype=wide)
        # With --deterministic a row of a product does not depend on the other rows, which torch does not promise of a
        # mean. So the mean of the squares is a product, too.
        self._mean = torch.full((1, size), 1 / size, dtype=wide, device=source.device)
        self._base = source.take(f"{prefix}base", (count,), dtype=wide)
        self._scales = source.take(f"{prefix}scale", (kinds,), dtype=wide).repeat_interleave(mixing.streams)

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [T, streams * hidden] float32. Returns [T, kinds * streams] float32."""
        scale = torch.rsqrt(self._ops.linear(streams.square(), self._mean) + self._eps)
        return torch.sigmoid(self._ops.linear(streams, self._weight) * scale * self._scales + self._base)


class StreamHead:
    """The sum of a token's streams, each multiplied by a gate (DeepSeek-AI, DeepSeek-V4, 2026)."""

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing) -> None:
        """The arguments are those of StreamGates."""
        self._gates, self._gate_eps = StreamGates(source, prefix, hidden, mixing, kinds=1), mixing.gate_eps

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [T, streams * hidden]. Returns [T, hidden]."""
        wide = streams.float()
        return _sum(self._gates(wide) + self._gate_eps, wide).to(streams.dtype)


class HyperConnection:
    """The inputs and outputs of one block of a layer, without a mixing of the streams among themselves (Tencent, Hy4,
    2026).

    The block's input is the sum of the streams, each multiplied by a gate. Its result is added to each stream,
    multiplied by another gate.
    """

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing) -> None:
        """The arguments are those of StreamGates."""
        self._gates, self._mixing = StreamGates(source, prefix, hidden, mixing, kinds=2), mixing

    def inputs(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's inputs [T, hidden], and the gates of its result for `add`, [T, streams] float32."""
        wide = streams.float()
        before, after = self._gates(wide).chunk(2, dim=1)
        inputs = _sum(before + self._mixing.gate_eps, wide).to(streams.dtype)
        return inputs, after * self._mixing.magnitude + self._mixing.gate_eps

    def add(self, result: torch.Tensor, gates: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return the streams after the block, [T, streams * hidden]. result: of the block, [T, hidden]."""
        added = gates[:, :, None] * result.float()[:, None]
        return added.flatten(1).add_(streams).to(streams.dtype)


def _sum(gates: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """gates: [T, streams]. streams: [T, streams * hidden]. Returns [T, hidden]. All are float32."""
    return torch.bmm(gates[:, None], streams.view(*gates.shape, -1))[:, 0]
