"""Mixtures of experts: MLPs of which each token uses a few, chosen by a router (Shazeer et al., 2017)."""

from collections.abc import Callable
from dataclasses import replace

import torch

from baton_engine.experts_method import ExpertNames, ExpertsMethod, JoinedForm
from baton_engine.inputs import InputRows, Inputs, NormedNumbers
from baton_engine.joined_tensors import JoinedTensors
from baton_engine.shard import Ranks
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .linear import Linear
from .table_router import TableRouter

# Each program of a router's kernel computes the norm. As they are few, this pays off for longer rows than in a product.
_MOST_NORMED = 4096
# The names of a weight's tensor in the formats that store experts one by one.
_WEIGHTS = ("weight", "weight_packed", "qweight")


class Router:
    """Chooses the experts of each token, as baton_kernels.reference.routing.route_reference does.

    correction: [experts] float32, added to the scores for the choice; None = 0. scales: [experts] float32, factors of
    the weights; None = 1. transposed: the checkpoint stores the weight as [inputs, experts]. factor: of the logits.
    """

    inputs: Inputs = NormedNumbers(_MOST_NORMED)

    def __init__(
        self,
        source: Source,
        routing: Routing,
        experts: int,
        hidden: int,
        *,
        bias: bool = False,
        correction: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        transposed: bool = False,
        factor: float = 1.0,
    ) -> None:
        shape = (hidden, experts) if transposed else (experts, hidden)
        if factor == 1.0:
            stored = source.take("weight", shape)
        else:
            # The product is rounded once.
            stored = (source.take("weight", shape, dtype=torch.float32) * factor).to(source.dtype)
        self._weight = stored.T.contiguous() if transposed else stored
        self._bias = source.take("bias", (experts,)) if bias else None
        self._correction, self._scales = correction, scales
        own = source.own_experts(experts) if routing.own is None else routing.own
        self._routing = replace(routing, own=own) if len(own) < experts else routing
        self._ops = source.ops

    def __call__(self, x: InputRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. Returns x as a plain tensor, the weights, [T, count], and the experts, [T, count] int32, by
        their indices on this rank."""
        return self._ops.route(x, self._weight, self._bias, self._correction, self._routing, self._scales)


def load_experts(source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
    """Return the experts of a layer, as Method.experts does, with the source's method for their names."""
    parts = [f"{number}.{part}" for number in range(experts) for part in (*names.inner, names.down)]
    own = source.own_experts(experts)
    if len(own) < experts:
        source.leave([number for number in range(experts) if number not in own])
    return source.method(parts).experts(source, names, experts, hidden, size)


def load_joined_experts(source: Source, experts: int, hidden: int, size: int, form: JoinedForm) -> ExpertsMethod:
    """Return the experts of a layer as load_experts does, from tensors that have those of all experts.

    Tools that quantize, such as llm-compressor, store the experts of these families one by one.
    """
    names = ExpertNames("gate_proj", "up_proj", "down_proj", form.interleaved, form.activation)
    apart = source.at(form.apart) if form.apart else source
    if form.down in source or not any(f"0.{names.down}.{weight}" in apart for weight in _WEIGHTS):
        apart = source.reading(JoinedTensors(source, form, names, experts, hidden, size))
    return load_experts(apart, names, experts, hidden, size)


class ExpertMlp:
    """The weighted sum of the results of a token's experts."""

    def __init__(self, router: Router | TableRouter, experts: ExpertsMethod, ranks: Ranks) -> None:
        self._router, self._experts, self._ranks = router, experts, ranks
        self.inputs = router.inputs

    def __call__(self, x: InputRows, *given: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. given: what the router takes beside x. Returns [T, hidden]."""
        return self._ranks.sum(self.part(x, *given)[1])

    def part(self, x: InputRows, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x as a plain tensor, and this rank's contribution to the sum, [T, hidden] each."""
        x, weights, experts = self._router(x, *given)
        return x, self._experts(x, weights, experts)


class ScaledInputMlp(ExpertMlp):
    """The sum of the results of a token's experts, whose inputs are multiplied by the router's weights (Meta, Llama
    4)."""

    def part(self, x: InputRows, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weights, experts = self._router(x, *given)
        single, count = torch.ones_like(weights).view(-1, 1), weights.shape[1]
        # Each expert of a token has inputs of its own, and thus a row of its own.
        rows = (x.repeat_interleave(count, dim=0) if count > 1 else x) * weights.view(-1, 1)
        results = self._experts(rows.to(x.dtype), single, experts.view(-1, 1))
        return x, results.view(len(x), count, -1).sum(dim=1) if count > 1 else results


class WithSharedExpert:
    """Experts, and one more that all tokens use (Dai et al., "DeepSeekMoE", 2024).

    shared: returns this rank's contribution to the sum. gate: the shared expert's result is multiplied by
    sigmoid(gate(x)) (Qwen Team, "Qwen1.5-MoE", 2024); None = by 1.
    """

    def __init__(
        self, experts: ExpertMlp, shared: Callable[[torch.Tensor], torch.Tensor], ranks: Ranks,
        gate: Linear | None = None,
    ) -> None:  # fmt: skip
        self._experts, self._shared, self._ranks, self._gate = experts, shared, ranks, gate
        self.inputs = experts.inputs

    def __call__(self, x: InputRows, *given: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. given: what the router takes beside x. Returns [T, hidden]."""
        x, part = self._experts.part(x, *given)
        shared = self._shared(x)
        shared = shared if self._gate is None else torch.sigmoid(self._gate(x)) * shared
        return self._ranks.sum(part.add_(shared))
