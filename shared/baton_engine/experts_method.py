"""The interface of experts' weights in memory, and how checkpoints name and store them."""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from baton_kernels.reference.activation import ExpertGate


@dataclass(frozen=True)
class ExpertNames:
    """A family's names for the parts of an expert. gate: None = experts have no gates. bias: each part has one.
    activation: that of the gate, or a NoGate."""

    gate: str | None
    up: str
    down: str
    bias: bool = False
    activation: ExpertGate = "silu"

    def gated(self, activation: str) -> Self:
        """Return these names with an activation."""
        return replace(self, activation=activation)

    @property
    def inner(self) -> list[str]:
        """The parts that compute an expert's hidden units, in the order in which their weights are stacked."""
        return [self.up] if self.gate is None else [self.gate, self.up]


@dataclass(frozen=True)
class JoinedForm:
    """How a checkpoint stores the experts of a layer together: one tensor for gates and ups, one for the outputs.

    gate_up, down: the tensors' names. interleaved: gates and ups alternate, and all parts have biases (gpt-oss).
    Otherwise gates come first, and no part has a bias. up: the name of a separate tensor for ups (Step 3.5). flat: each
    tensor is [experts * units, hidden], and `up` is given (DBRX). activation: that of the gate. apart: the prefix
    before the number of each expert in checkpoints that store experts one by one; "" = the prefix of the joint tensors.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    up: str | None = None
    flat: bool = False
    activation: ExpertGate = "silu"
    apart: str = ""

    def gated(self, activation: str) -> Self:
        """Return this form with an activation."""
        return replace(self, activation=activation)


class ExpertsMethod(Protocol):
    """The weights of a layer's experts in memory, and the products with them."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the weighted sum of the results of each token's experts, [T, hidden].

        x: [T, hidden]. weights: [T, count] float32. experts: [T, count] int32, as Router returns them.
        """
