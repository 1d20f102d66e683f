"""The interface of all kinds of experts' weights that are in memory."""

from dataclasses import dataclass
from typing import Protocol

import torch

from baton_kernels.reference.activation import ExpertGate


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of an expert. bias: each of them has one. activation: of the gate."""

    gate: str
    up: str
    down: str
    bias: bool = False
    activation: ExpertGate = "silu"


@dataclass(frozen=True)
class JoinedForm:
    """How a checkpoint stores the experts of a layer together: one tensor for gates and ups, one for the outputs.

    gate_up, down: the tensors' names. in_turn: gates and ups of an expert are in turn, and all parts have biases
    (gpt-oss). Otherwise gates come first, and nothing has a bias. up: ups have a tensor of this name, and each of the
    three is [experts * units, hidden] (DBRX). activation: of the gate. apart: where each expert has its number in a
    checkpoint that stores them one by one; "" = where the tensors of all experts would be.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    in_turn: bool = False
    up: str | None = None
    activation: ExpertGate = "silu"
    apart: str = ""


class ExpertsMethod(Protocol):
    """The products with the weights of a layer's experts: how these are held in memory and multiplied."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts, [T, hidden], as far as this rank computes it.

        x: [T, hidden]. weights: [T, count] float32. experts: [T, count] int32, as Router returns them.
        """
