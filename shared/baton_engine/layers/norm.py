"""Normalization of hidden states."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from baton_engine.inputs import InputRows, Inputs, OutputRows, inputs_of
from baton_engine.ops import Ops
from baton_engine.source import Source
from baton_kernels.reference.norm import PendingNorm, sum_of


class RmsNorm:
    """x / rms(x) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

    offset: added to the checkpoint's weights in float32; the product is then rounded only once (Gemma). part: the
    elements of x that this rank has; None = all.
    """

    def __init__(self, source: Source, size: int, eps: float, offset: float = 0.0, part: slice | None = None) -> None:
        if offset:
            self.weight = source.take("weight", (size,), dtype=torch.float32) + offset
        else:
            self.weight = source.take("weight", (size,), None if part is None else (part,))
        self._ops = source.ops
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size]. Returns a new tensor."""
        return self._ops.add_rms_norm(x, None, self.weight, self.eps)

    def given(self, x: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        """Return the norm of a part x [T, n] of vectors. mean_square: [T] float32, over the elements of all parts."""
        scale = torch.rsqrt(mean_square + self.eps)[:, None]
        return ((x * scale).to(self.weight.dtype) * self.weight).to(x.dtype)

    def later(self, x: torch.Tensor) -> PendingNorm:
        """Return the norm of x in a pending form, so that `add` of the next norm computes both norms in one kernel."""
        return PendingNorm(x, None, self.weight, self.eps, x)

    def add(self, x: OutputRows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual, which may be overwritten, and return the norm of the sum and the sum. None stands for
        zeros."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps), sum_of(x, residual)

    def before(self, part: object) -> "InputNorm":
        """Return this norm with results in the form that a part of a layer takes."""
        return InputNorm(self, inputs_of(part), self._ops)


class WideRmsNorm(RmsNorm):
    """An RmsNorm whose product with the weight is rounded only once (Gemma 3n and 4)."""

    def __init__(self, source: Source, size: int, eps: float) -> None:
        self.weight = source.take("weight", (size,), dtype=torch.float32)
        self._ops, self.eps = source.ops, eps


class UnitNorm(RmsNorm):
    """x / rms(x), for which a checkpoint has no weights of a norm. weight: [size], of another origin; None = 1."""

    def __init__(self, source: Source, size: int, eps: float, weight: torch.Tensor | None = None) -> None:
        self.weight = torch.ones(size, dtype=source.dtype, device=source.device) if weight is None else weight
        self._ops, self.eps = source.ops, eps


class ScaledInputNorm:
    """w * x / rms(w * x), where w is the sum of the checkpoint's weights and offset (Meta, Muse Spark, 2026)."""

    def __init__(self, source: Source, size: int, eps: float, offset: float) -> None:
        self._weight = source.take("weight", (size,), dtype=torch.float32) + offset
        self._norm = UnitNorm(source, size, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size]. Returns a new tensor."""
        return self._norm((x * self._weight).to(x.dtype))


class InputNorm:
    """An RmsNorm whose result is in the form that the product after it takes."""

    def __init__(self, norm: RmsNorm, into: Inputs, ops: Ops) -> None:
        self._weight, self._eps, self._into, self._ops = norm.weight, norm.eps, into, ops

    def __call__(self, x: torch.Tensor) -> InputRows:
        """As RmsNorm does."""
        return self._into.norm(self._ops, x, None, self._weight, self._eps)[0]

    def add(self, x: OutputRows, residual: torch.Tensor | None) -> tuple[InputRows, torch.Tensor]:
        """As RmsNorm.add does. The sum may be undefined until the product after the norm has been computed."""
        return self._into.norm(self._ops, x, residual, self._weight, self._eps)


class NormedOutput:
    """A block of a layer with a norm of its output."""

    def __init__(self, block: Callable[..., torch.Tensor], norm: RmsNorm) -> None:
        self._block, self._norm, self.inputs = block, norm, inputs_of(block)

    def __call__(self, *inputs: Any) -> torch.Tensor:
        """inputs: of the block. Returns a new tensor."""
        return self._norm(self._block(*inputs))


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias (Ba et al., "Layer Normalization", 2016).

    weight, bias: whether the checkpoint has them; without one it is 1 or 0. offset: added to the weights.
    """

    def __init__(
        self, source: Source, size: int, eps: float, *, weight: bool = True, bias: bool = True, offset: float = 0.0
    ) -> None:
        self._shape = (size,)
        self._weight = source.take("weight", self._shape) + offset if weight else None
        self._bias = source.take("bias", self._shape) if bias else None
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size]. Returns a new tensor."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As RmsNorm.add does."""
        total = x if residual is None else residual.add_(x)
        return self(total), total


class NoNorm:
    """Takes the place of a norm that a model does not have, such as that after the last layer."""

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of both twice. None stands for zeros."""
        total = x if residual is None else residual.add_(x)
        return total, total


class HeadLayerNorms:
    """A projection to queries, keys and values, with a LayerNorm of each query head and of each key head.

    weights, biases: [heads of the queries and then of the keys, head_dim] float32. Without biases they are 0.
    """

    def __init__(
        self, qkv: Callable[[Any], torch.Tensor], weights: torch.Tensor, eps: float, biases: torch.Tensor | None = None
    ) -> None:
        self._qkv, self._weights, self._biases, self._eps = qkv, weights, biases, eps
        self.inputs = inputs_of(qkv)

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        heads = qkv[:, : self._weights.numel()].view(len(qkv), *self._weights.shape)
        normed = functional.layer_norm(heads.float(), heads.shape[-1:], eps=self._eps).mul_(self._weights)
        heads.copy_(normed if self._biases is None else normed.add_(self._biases))
        return qkv
