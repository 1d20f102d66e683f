"""Experts whose weights are not quantized."""

from dataclasses import dataclass
from typing import Self

import torch

from baton_engine.ops import Ops
from baton_engine.source import Source
from baton_kernels.reference.activation import ClampedGate
from baton_kernels.reference.experts import ExpertWeights


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of an expert."""

    gate: str
    up: str
    down: str


class DenseExperts:
    """The weights of experts in the dtype that the engine computes in.

    Experts are copied into place one by one: all of them a second time may not fit into the device's memory.
    """

    def __init__(self, held: ExpertWeights, ops: Ops) -> None:
        self._held, self._ops = held, ops

    @classmethod
    def load(cls, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> Self:
        """Read each expert's projections, which a checkpoint stores at the expert's number, [outputs, inputs] each."""
        held = _empty(source, experts, hidden, size)
        for number in range(experts):
            expert = source.at(str(number))
            held.gate_up[number, :size] = expert.take(f"{names.gate}.weight", (size, hidden))
            held.gate_up[number, size:] = expert.take(f"{names.up}.weight", (size, hidden))
            held.down[number] = expert.take(f"{names.down}.weight", (hidden, size))
        return cls(held, source.ops)

    @classmethod
    def load_joined(cls, source: Source, experts: int, hidden: int, size: int, clamp: ClampedGate) -> Self:
        """Read the tensors of all experts together, as gpt-oss stores them: weights as [inputs, outputs], and the gates
        and ups of gate_up_proj in turn."""
        up_bias = source.take("gate_up_proj_bias", (experts, 2 * size))
        down_bias = source.take("down_proj_bias", (experts, hidden))
        held = _empty(source, experts, hidden, size)
        for number in range(experts):
            part = slice(number, number + 1), slice(None), slice(None)
            gate_up = source.take("gate_up_proj", (experts, hidden, 2 * size), part)[0]
            held.gate_up[number, :size], held.gate_up[number, size:] = gate_up[:, ::2].t(), gate_up[:, 1::2].t()
            held.down[number] = source.take("down_proj", (experts, size, hidden), part)[0].t()
        biases = torch.cat([up_bias[:, ::2], up_bias[:, 1::2]], dim=1), down_bias
        return cls(ExpertWeights(held.gate_up, held.down, *biases, clamp), source.ops)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._ops.run_experts(x, self._held, weights, experts)


def _empty(source: Source, experts: int, hidden: int, size: int) -> ExpertWeights:
    return ExpertWeights(
        torch.empty(experts, 2 * size, hidden, dtype=source.dtype, device=source.device),
        torch.empty(experts, hidden, size, dtype=source.dtype, device=source.device),
    )
