"""The parts that models are composed of; each takes its own tensors from the checkpoint."""

from collections.abc import Callable

import torch
from torch.nn import functional

from baton_engine.config import ConfigError
from baton_engine.loading import Weights

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Linear:
    """y = x Wᵀ + b, where W may be several projections of the checkpoint stacked along their outputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    @classmethod
    def load(cls, weights: Weights, names: list[str], outputs: list[int], inputs: int, bias: bool) -> "Linear":
        """Stack the projections called `names`, each [its outputs, inputs]."""
        stacked = torch.cat([weights.take(f"{n}.weight", (o, inputs)) for n, o in zip(names, outputs, strict=True)])
        biases = [weights.take(f"{n}.bias", (o,)) for n, o in zip(names, outputs, strict=True)] if bias else None
        return cls(stacked, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs]."""
        if self._weight is None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in oneDNN's blocked layout where that exists: 2 to 4 times faster than plain for small batches
    on CPU, 1.2 times for large ones."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


class RmsNorm:
    """x / rms(x) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]. Returns the same shape; the mean is taken in float32."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(self._eps))
        return (x * scale).to(x.dtype).mul_(self._weight)


class Mlp:
    """down(act(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, intermediate: int, act: str, bias: bool) -> None:
        if act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {act!r} is unknown; served are {', '.join(ACTIVATIONS)}")
        self._act = ACTIVATIONS[act]
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = Linear.load(weights, names, [intermediate] * 2, hidden, bias)
        self._down = Linear.load(weights, [f"{prefix}.down_proj"], [hidden], intermediate, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._act(gate).mul_(up))
