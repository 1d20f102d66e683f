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
    """Logits of gates that are computed from all streams of a token, in float32: W x / rms(x) * scale + base.

    source: of tensors whose names are `prefix` and then fn, base or scale. kinds: how many gates there are of each
    kind, which has a scale.
    """

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing, kinds: list[int]) -> None:
        self._ops, self._eps = source.ops, mixing.eps
        count, size, wide = sum(kinds), mixing.streams * hidden, torch.float32
        self._weight = source.take(f"{prefix}fn", (count, size), dtype=wide)
        # With --deterministic a row of a product does not depend on the other rows, which torch does not promise of a
        # mean. So the mean of the squares is a product, too.
        self._mean = torch.full((1, size), 1 / size, dtype=wide, device=source.device)
        self._base = source.take(f"{prefix}base", (count,), dtype=wide)
        scales = source.take(f"{prefix}scale", (len(kinds),), dtype=wide)
        self._scales = torch.cat([scale.repeat(kind) for scale, kind in zip(scales, kinds, strict=True)])

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [T, streams * hidden] float32. Returns [T, gates of all kinds] float32."""
        scale = torch.rsqrt(self._ops.linear(streams.square(), self._mean) + self._eps)
        return self._ops.linear(streams, self._weight) * scale * self._scales + self._base


class StreamHead:
    """The sum of a token's streams, each multiplied by a gate (DeepSeek-AI, DeepSeek-V4, 2026)."""

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing) -> None:
        """The arguments are those of StreamGates."""
        self._gates, self._gate_eps = StreamGates(source, prefix, hidden, mixing, [mixing.streams]), mixing.gate_eps

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [T, streams * hidden]. Returns [T, hidden]."""
        wide = streams.float()
        return _sum(self._gates(wide).sigmoid() + self._gate_eps, wide).to(streams.dtype)


class StreamMean:
    """The mean of a token's streams (GLM Team, GLM-5.3-Flash, 2026). streams: how many there are."""

    def __init__(self, streams: int) -> None:
        self._streams = streams

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [T, streams * hidden]. Returns [T, hidden]."""
        wide = streams.float()
        return _sum(wide.new_full((len(wide), self._streams), 1 / self._streams), wide).to(streams.dtype)


class HyperConnection:
    """The inputs and outputs of one block of a layer, without a mixing of the streams among themselves (Tencent, Hy4,
    2026).

    The block's input is the sum of the streams, each multiplied by a gate. Its result is added to each stream,
    multiplied by another gate.
    """

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing) -> None:
        """The arguments are those of StreamGates."""
        self._gates, self._mixing = StreamGates(source, prefix, hidden, mixing, [mixing.streams] * 2), mixing

    def inputs(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's inputs [T, hidden], and the gates of its result for `add`, [T, streams] float32."""
        wide = streams.float()
        before, after = self._gates(wide).sigmoid().chunk(2, dim=1)
        inputs = _sum(before + self._mixing.gate_eps, wide).to(streams.dtype)
        return inputs, after * self._mixing.magnitude + self._mixing.gate_eps

    def add(self, result: torch.Tensor, gates: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return the streams after the block, [T, streams * hidden]. result: of the block, [T, hidden]."""
        added = gates[:, :, None] * result.float()[:, None]
        return added.flatten(1).add_(streams).to(streams.dtype)


class MixedConnection:
    """The inputs and outputs of one block of a layer, with a mixing of the streams among themselves (Xie et al., "mHC",
    2025; DeepSeek-AI, DeepSeek-V4, 2026).

    As HyperConnection, but a weighted sum of the streams before the block takes the place of each stream after it. The
    weights of a token form a matrix whose rows and columns have sums of about 1. The gates of the block's result have
    no gate_eps.
    """

    def __init__(self, source: Source, prefix: str, hidden: int, mixing: Mixing, rounds: int) -> None:
        """rounds: as sinkhorn_reference has it, whose eps is gate_eps. The other arguments are those of
        StreamGates."""
        count, self._ops, self._mixing, self._rounds = mixing.streams, source.ops, mixing, rounds
        self._gates = StreamGates(source, prefix, hidden, mixing, [count, count, count * count])

    def inputs(self, streams: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the block's inputs [T, hidden], and what `add` takes: the gates of its result, [T, streams], and the
        weights [T, streams before, streams after], both float32."""
        wide, (count, _, eps, magnitude) = streams.float(), self._mixing
        logits = self._gates(wide)
        gates, mixing = logits[:, : 2 * count].sigmoid(), torch.unflatten(logits[:, 2 * count :], 1, (count, count))
        inputs = _sum(gates[:, :count] + eps, wide).to(streams.dtype)
        return inputs, (gates[:, count:] * magnitude, self._ops.sinkhorn(mixing, self._rounds, eps))

    def add(
        self, result: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], streams: torch.Tensor
    ) -> torch.Tensor:
        """Return the streams after the block, [T, streams * hidden]. result: of the block, [T, hidden]."""
        added, mixing = gates
        before = torch.unflatten(streams.float(), 1, (self._mixing.streams, -1))
        after = torch.baddbmm(added[:, :, None] * result.float()[:, None], mixing.transpose(1, 2), before)
        return after.flatten(1).to(streams.dtype)


def _sum(gates: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """gates: [T, streams]. streams: [T, streams * hidden]. Returns [T, hidden]. All are float32."""
    return torch.bmm(gates[:, None], streams.view(*gates.shape, -1))[:, 0]
