"""The parts that models are composed of; each takes its own tensors from the checkpoint."""

import torch

from baton_engine.loading import Weights
from baton_engine.ops import Ops


class Linear:
    """y = x Wᵀ + b, where W may be several projections of the checkpoint stacked along their outputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> None:
        self._bias = bias
        self._ops = ops
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    @classmethod
    def load(
        cls, weights: Weights, names: list[str], outputs: list[int], inputs: int, bias: bool, ops: Ops
    ) -> "Linear":
        """Stack the projections called `names`, each [its outputs, inputs]."""
        stacked = torch.cat([weights.take(f"{n}.weight", (o, inputs)) for n, o in zip(names, outputs, strict=True)])
        biases = [weights.take(f"{n}.bias", (o,)) for n, o in zip(names, outputs, strict=True)] if bias else None
        return cls(stacked, torch.cat(biases) if biases else None, ops)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs], in out when given."""
        if self._weight is None:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return result if out is None else out.copy_(result)
        return self._ops.linear(x, self._weight, self._bias, False, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """As if called, where the outputs are gates, then as many ups. Returns silu(gate) * up, [T, outputs / 2]."""
        if self._weight is None:
            return self._ops.silu_mul(self(x))
        return self._ops.linear(x, self._weight, self._bias, True)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in oneDNN's blocked layout where that exists: on CPU several times as fast as the plain one
    for small batches, 1.2 times for large ones."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


class Mlp:
    """down(silu(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, intermediate: int, bias: bool, ops: Ops) -> None:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = Linear.load(weights, names, [intermediate] * 2, hidden, bias, ops)
        self._down = Linear.load(weights, [f"{prefix}.down_proj"], [hidden], intermediate, bias, ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up.gated(x))
