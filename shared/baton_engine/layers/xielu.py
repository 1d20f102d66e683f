"""The activation xIELU (Huang and Schlag, "Deriving Activation Functions Using Integration", 2024)."""

import torch
from torch.nn import functional

from baton_engine.source import Source

_SLOPE = 0.5  # at 0
_LEAST = -1e-6  # stands for numbers closer to 0, whose exponential less 1 is not exact


class XIelu:
    """a x^2 + x / 2 above 0, and b (exp(x) - 1 - x) + x / 2 up to 0. A checkpoint stores each layer's a and b in the
    form in which they were trained."""

    def __init__(self, source: Source) -> None:
        above, below = (source.take(name, (1,), dtype=torch.float32) for name in ("alpha_p", "alpha_n"))
        self._above = functional.softplus(above).to(source.dtype)
        self._below = (_SLOPE + functional.softplus(below)).to(source.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: of any shape. Returns a new tensor."""
        above = x.square().mul_(self._above)
        below = x.clamp(max=_LEAST).expm1_().sub_(x).mul_(self._below)
        return torch.where(x > 0, above, below).add_(x, alpha=_SLOPE)
