"""MLPs of which each token uses a few, chosen by a router (Shazeer et al., 2017)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_engine.source import Source

from .linear import Linear


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of an expert, which are at "experts.<number>" beside the router."""

    router: str
    gate: str
    up: str
    down: str


class ExpertMlp:
    """The weighted sum of a token's experts, each down(silu(gate(x)) * up(x)).

    A router gives each expert a probability, by which the `chosen` most probable ones are chosen and weighted.
    normalize: divide the weights of a token by their sum.
    """

    def __init__(
        self,
        source: Source,
        names: ExpertNames,
        *,
        hidden: int,
        size: int,
        experts: int,
        chosen: int,
        normalize: bool,
    ) -> None:
        self._router = Linear(source, [names.router], [experts], hidden, sensitive=True)
        self._chosen, self._normalize, self._ops = chosen, normalize, source.ops
        # Experts are copied into place one by one: all of them a second time may not fit into the device's memory.
        self._gate_up = torch.empty(experts, 2 * size, hidden, dtype=source.dtype, device=source.device)
        self._down = torch.empty(experts, hidden, size, dtype=source.dtype, device=source.device)
        for number in range(experts):
            expert = source.at(f"experts.{number}")
            self._gate_up[number, :size] = expert.weight(names.gate, size, hidden)
            self._gate_up[number, size:] = expert.weight(names.up, size, hidden)
            self._down[number] = expert.weight(names.down, hidden, size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        weights, experts = self._ops.route(self._router(x), self._chosen, self._normalize)
        return self._ops.run_experts(x, self._gate_up, self._down, weights, experts)


class WithSharedExpert:
    """Experts, and one more that all tokens use, times sigmoid(gate(x)) (Qwen Team, "Qwen1.5-MoE", 2024)."""

    def __init__(self, experts: ExpertMlp, shared: Callable[[torch.Tensor], torch.Tensor], gate: Linear) -> None:
        self._experts, self._shared, self._gate = experts, shared, gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._experts(x).add_(torch.sigmoid(self._gate(x)) * self._shared(x))
