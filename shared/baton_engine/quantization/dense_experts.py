"""Experts whose weights are not quantized."""

from dataclasses import replace
from typing import Self

import torch

from baton_engine.experts_method import ExpertNames, JoinedForm
from baton_engine.ops import Ops
from baton_engine.source import Source
from baton_kernels.reference.experts import ExpertWeights


class DenseExperts:
    """The weights of experts in the dtype that the engine computes in.

    Each rank has some of the experts, or a part of every expert's hidden units, so the results of the ranks are to be
    added up. Experts are copied into place one by one: all of them a second time may not fit into the device's memory.
    """

    def __init__(self, held: ExpertWeights, ops: Ops) -> None:
        self._held, self._ops = held, ops

    @classmethod
    def load(cls, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> Self:
        """As in Method, from weights that are stored in any way."""
        units = source.own_units(size)
        own = units.stop - units.start
        held = _empty(source, experts, hidden, own)
        for place, number in enumerate(source.own_experts(experts)):
            expert = source.at(str(number))
            held.gate_up[place, :own] = expert.weight(names.gate, size, hidden, rows=units)
            held.gate_up[place, own:] = expert.weight(names.up, size, hidden, rows=units)
            held.down[place] = expert.weight(names.down, hidden, size, columns=units)
        return cls(held, source.ops)

    @classmethod
    def load_joined(cls, source: Source, experts: int, hidden: int, size: int, form: JoinedForm) -> Self:
        """As in Method, from weights that are not quantized, with the gates of an expert first."""
        units = source.own_units(size)
        own, ups = units.stop - units.start, slice(size + units.start, size + units.stop)
        held = _empty(source, experts, hidden, own)
        # Some tools store these tensors as [inputs, outputs].
        both, back = (experts, 2 * size, hidden), (experts, hidden, size)
        plain = source.stored_shape(form.gate_up) == both and source.stored_shape(form.down) == back
        for place, number in enumerate(source.own_experts(experts)):
            one, whole = slice(number, number + 1), slice(0, hidden)
            for part, to in ((units, slice(0, own)), (ups, slice(own, 2 * own))):
                held.gate_up[place, to] = _take(source, form.gate_up, both, (one, part, whole), plain)
            held.down[place] = _take(source, form.down, back, (one, whole, units), plain)
        return cls(replace(held, clamp=form.clamp), source.ops)

    @classmethod
    def load_rows(cls, source: Source, experts: int, hidden: int, size: int, form: JoinedForm) -> Self:
        """As in Method, from weights that are not quantized, as DBRX has them."""
        assert form.up is not None
        units = source.own_units(size)
        own, shape = units.stop - units.start, (experts * size, hidden)
        held = _empty(source, experts, hidden, own)
        for place, number in enumerate(source.own_experts(experts)):
            rows = (slice(number * size + units.start, number * size + units.stop),)
            held.gate_up[place, :own] = source.take(form.gate_up, shape, rows)
            held.gate_up[place, own:] = source.take(form.up, shape, rows)
            held.down[place] = source.take(form.down, shape, rows).t()
        return cls(held, source.ops)

    @classmethod
    def load_in_turn(cls, source: Source, experts: int, hidden: int, size: int, form: JoinedForm) -> Self:
        """As in Method, from weights that are not quantized, as gpt-oss has them."""
        units = source.own_units(size)
        both, own = slice(2 * units.start, 2 * units.stop), units.stop - units.start
        biases = joined_biases(source, experts, hidden, size)
        held = _empty(source, experts, hidden, own)
        for place, number in enumerate(source.own_experts(experts)):
            one = slice(number, number + 1)
            gate_up = source.take("gate_up_proj", (experts, hidden, 2 * size), (one, slice(None), both))[0]
            held.gate_up[place, :own], held.gate_up[place, own:] = gate_up[:, ::2].t(), gate_up[:, 1::2].t()
            held.down[place] = source.take("down_proj", (experts, size, hidden), (one, units, slice(None)))[0].t()
        return cls(ExpertWeights(held.gate_up, held.down, *biases, form.clamp, experts), source.ops)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._ops.run_experts(x, self._held, weights, experts)


def joined_biases(source: Source, experts: int, hidden: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the biases of experts that are stored together, [experts of this rank, 2 * its hidden units of each] and
    [experts of this rank, hidden]. The ranks' results are added up, so of the ranks that have a part of an expert only
    the first one has the latter, and the others have zeros."""
    units, own = source.own_units(size), as_slice(source.own_experts(experts))
    bias = source.take("gate_up_proj_bias", (experts, 2 * size), (own, slice(2 * units.start, 2 * units.stop)))
    down_bias = source.take("down_proj_bias", (experts, hidden), (own,))
    if units.start:
        down_bias.zero_()
    return torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1), down_bias


def _take(
    source: Source, name: str, shape: tuple[int, int, int], part: tuple[slice, slice, slice], plain: bool
) -> torch.Tensor:
    """Return a part of one expert, [outputs, inputs]. shape: [experts, outputs, inputs]. plain: it is stored like
    that, otherwise with outputs and inputs exchanged."""
    if plain:
        return source.take(name, shape, part)[0]
    experts, outputs, inputs = shape
    one, rows, columns = part
    return source.take(name, (experts, inputs, outputs), (one, columns, rows))[0].t()


def as_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _empty(source: Source, experts: int, hidden: int, size: int) -> ExpertWeights:
    own = len(source.own_experts(experts))
    return ExpertWeights(
        torch.empty(own, 2 * size, hidden, dtype=source.dtype, device=source.device),
        torch.empty(own, hidden, size, dtype=source.dtype, device=source.device),
        layer_experts=experts,
    )
