"""The MLPs of transformer layers, which work on each token alone."""

from typing import Any, Protocol

import torch

from baton_engine.inputs import InputRows, Inputs
from baton_kernels.reference.activation import Activation, ClampedGate, LimitedGate, expert_gate_reference

from .linear import Linear


class GatesAndUps(Protocol):
    """A projection to gates and ups, such as a Linear."""

    @property
    def inputs(self) -> Inputs:
        """The form in which it takes its inputs."""

    def gated(self, x: Any, activation: str, into: Inputs) -> InputRows:
        """Return activation(gate) * up, [T, units], as Product.gated does."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020).

    gate_up: returns the gates, then as many ups. activation: a key of ACTIVATIONS.
    """

    def __init__(self, gate_up: GatesAndUps, down: Linear, activation: str) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self.inputs = gate_up.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._down(self._gate_up.gated(x, self._activation, self._down.inputs))


class LimitedMlp:
    """A GatedMlp whose gates and ups have limits. gate_up, down: as in GatedMlp."""

    def __init__(self, gate_up: Linear, down: Linear, gate: LimitedGate | ClampedGate) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self.inputs = gate_up.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._down(expert_gate_reference(self._gate_up(x), self._gate))


class Mlp:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self._up, self._down, self._activation = up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._down(self._activation(self._up(x)))
