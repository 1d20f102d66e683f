"""Layers with a recurrent state in place of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch.nn import functional

from baton_engine.config import ConfigError
from baton_engine.context import Context
from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.shard import Columns, Rows, even_part
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateInputs, StateShape

from .grouped_norm import GroupedNorm
from .linear import Linear
from .norm import RmsNorm


class _Convolution:
    """The short convolution of queries, keys and values, as far as this rank computes it.

    names: of its tensors in the checkpoint, which hold channels one after another. channels: that of the checkpoint
    for each channel of queries, keys and values; None = the same ones.
    """

    def __init__(
        self, source: Source, shape: StateShape, bias: bool = False, channels: Sequence[int] | None = None,
        names: Sequence[str] = ("conv1d",),
    ) -> None:  # fmt: skip
        sizes = [shape.keys, shape.keys, shape.values]
        order = torch.arange(shape.channels) if channels is None else torch.tensor(channels)
        parts = [part[even_part(len(part), source.ranks, "channels")] for part in torch.split(order, sizes)]
        own = torch.cat(parts).to(source.device)
        stored = sizes if len(names) > 1 else [int(order.max()) + 1]
        held = [(source.at(name), size) for name, size in zip(names, stored, strict=True)]
        weights = [inside.take("weight", (size, 1, shape.length)) for inside, size in held]
        self.weight = torch.cat(weights).flatten(1)[own]
        self.bias = torch.cat([inside.take("bias", (size,)) for inside, size in held])[own] if bias else None


class DeltaInputs(Protocol):
    """Computes what the delta rule takes of a rank's heads."""

    @property
    def inputs(self) -> Inputs:
        """The form in which it takes hidden states."""

    def __call__(self, x: InputRows) -> Sequence[torch.Tensor]:
        """x: [T, hidden]. Returns the inputs of the convolution, the gates of the results [T, values], and gates and
        rates as StateInputs has them."""


class OneProjection:
    """Computes all of them by one product. Implements DeltaInputs.

    projection: to these tensors, side by side. shape: the heads of this rank. rates: of a head.
    """

    def __init__(self, projection: Linear, shape: StateShape, rates: int = 1) -> None:
        self.inputs, self._projection = projection.inputs, projection
        self._sizes = [shape.channels, shape.values, shape.value_heads, rates * shape.value_heads]

    def __call__(self, x: InputRows) -> Sequence[torch.Tensor]:
        return torch.split(self._projection(x), self._sizes, dim=1)


@dataclass(frozen=True)
class Delta:
    """How a model has the gated delta rule.

    convolution, norm, output: the names of the convolution, the norm and the last projection. activation: of the gates
    of the result. by_element: each element of a key has a decay of its own (Kimi Team, "Kimi Linear", 2025). most,
    least: as in StateInputs. decay: what the names of the tensors of the decay begin with.
    """

    convolution: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    output: str = "out_proj"
    activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu
    by_element: bool = False
    most: float = 1.0
    least: float = 0.0
    decay: str = ""


class GatedDelta:
    """A gated delta network (Yang et al., 2025), with a norm of each head's result and a gate of it. Ranks divide the
    heads.

    compute: for the heads of this rank. whole: the heads of all ranks. eps: of the norm.
    """

    def __init__(
        self, source: Source, layer: int, compute: DeltaInputs, whole: StateShape, how: Delta, hidden: int, eps: float
    ) -> None:
        self._layer, self._op, self._compute = layer, source.ops.recurrence, compute
        self.inputs = compute.inputs
        self._shape = whole.part(source.ranks.count)
        self._convolution, self._how = _Convolution(source, whole, names=how.convolution), how
        heads, each = whole.value_heads, whole.key_dim if how.by_element else 1
        # Kimi Linear's checkpoints have axes of one element around that of the heads.
        shape = tuple(size if size == 1 else heads for size in source.stored_shape(f"{how.decay}A_log"))
        self._log_decay = source.take(f"{how.decay}A_log", shape, dtype=torch.float32).flatten()
        self._log_decay = self._log_decay[even_part(heads, source.ranks, "value heads")]
        rates = even_part(heads * each, source.ranks, "value heads")
        self._rate_bias = source.take(f"{how.decay}dt_bias", (heads * each,), (rates,), torch.float32)
        self._norm = RmsNorm(source.at(how.norm), whole.value_dim, eps)
        self._output = Linear(source, [how.output], [hidden], whole.values, shard=Rows(source.ranks))

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        shape, how = self._shape, self._how
        inputs, result_gates, gates, rates = self._compute(x)
        given = StateInputs(
            inputs, self._convolution.weight, None, rates, gates, self._log_decay, self._rate_bias, None, how.most,
            how.least,
        )  # fmt: skip
        planes = shape.planes(ctx.cache(self._layer)[1:])
        results = self._op(given, ctx.recent_slots(self._layer), *planes, shape, ctx.decodes_only)
        normed = self._norm(results.view(-1, shape.value_dim)).view(len(inputs), -1)
        return self._output((normed * how.activation(result_gates.float())).to(normed.dtype))


@dataclass(frozen=True)
class Mamba:
    """How a model has Mamba 2.

    groups: how many heads of keys the checkpoint has. bias, conv_bias, output_bias: of the projection, the convolution
    and the last projection. norm: of the gated result ("gated"), of the result before its gate ("result") or none ("").
    factor, factors: of the projection's inputs, and of its gates, values, keys, queries and rates (Falcon-H1).
    """

    groups: int
    bias: bool
    conv_bias: bool
    output_bias: bool
    norm: Literal["gated", "result", ""] = "gated"
    factor: float = 1.0
    factors: tuple[float, ...] = (1.0,) * 5


class Mamba2:
    """A layer of Mamba 2 (Dao and Gu, 2024). Ranks divide the heads.

    whole: the heads of all ranks, of which each key-value head of the cache has the same number. A rank keeps copies of
    the heads of keys, so that each of its key-value heads has one.
    """

    def __init__(self, source: Source, layer: int, whole: StateShape, how: Mamba, hidden: int, eps: float) -> None:
        ranks, inner, heads, groups = source.ranks, whole.values, whole.value_heads, how.groups
        if groups % ranks.count and ranks.count % groups:
            raise ConfigError(f"--tensor-parallel {ranks.count} does not divide the {groups} groups of Mamba's norms")
        self._layer, self._op, self._how = layer, source.ops.recurrence, how
        self._shape = shape = whole.part(ranks.count)
        # The checkpoint has gates, values, keys, queries and rates.
        copies = torch.arange(groups * whole.key_dim).view(groups, -1).repeat_interleave(whole.key_heads // groups, 0)
        keys, stored = copies.flatten(), groups * whole.key_dim
        channels = [*(inner + stored + keys).tolist(), *(inner + keys).tolist(), *range(inner)]
        order = [*(inner + channel for channel in channels), *range(inner)]
        order += range(2 * inner + 2 * stored, 2 * inner + 2 * stored + heads)
        self._projection = Linear(
            source, ["in_proj"], [2 * inner + 2 * stored + heads], hidden, bias=how.bias, order=order,
            parts=[whole.keys, whole.keys, inner, inner, heads], shard=Columns(ranks, "channels"),
        )  # fmt: skip
        self.inputs = self._projection.inputs if how.factor == 1.0 else NUMBERS
        gates, values, key, query, rates = how.factors
        factors = [query] * shape.keys + [key] * shape.keys + [values] * shape.values + [gates] * shape.values
        factors += [rates] * shape.value_heads
        self._factors = None
        if set(factors) != {1.0}:
            self._factors = torch.tensor(factors, dtype=source.dtype, device=source.device)
        self._convolution = _Convolution(source, whole, how.conv_bias, channels)
        own = even_part(heads, ranks, "heads of Mamba")
        self._log_decay, self._rate_bias, self._skip = (
            source.take(name, (heads,), (own,), torch.float32) for name in ("A_log", "dt_bias", "D")
        )
        self._norm = GroupedNorm(source.at("norm"), inner, eps, groups, ranks) if how.norm else None
        self._output = Linear(source, ["out_proj"], [hidden], inner, bias=how.output_bias, shard=Rows(ranks))

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        shape, convolution = self._shape, self._convolution
        if self._how.factor != 1.0:
            x = cast(torch.Tensor, x) * self._how.factor
        projected = self._projection(x)
        if self._factors is not None:
            projected *= self._factors
        inputs, gates, rates = torch.split(projected, [shape.channels, shape.values, shape.value_heads], dim=1)
        given = StateInputs(
            inputs, convolution.weight, convolution.bias, rates, None, self._log_decay, self._rate_bias, self._skip
        )
        planes = shape.planes(ctx.cache(self._layer)[1:])
        results = self._op(given, ctx.recent_slots(self._layer), *planes, shape, ctx.decodes_only)
        result, gate = results.flatten(1).float(), functional.silu(gates.float())
        if self._norm is None:
            result = result * gate
        else:
            result = self._norm(result) * gate if self._how.norm == "result" else self._norm(result * gate)
        return self._output(result.to(inputs.dtype))
