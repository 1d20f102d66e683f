"""The part of one projection that a rank has, with weights and activations in 8 bits."""

from typing import NamedTuple

import torch

from baton_kernels.reference.scaled_linear import ScaledWeight


class Part(NamedTuple):
    """scale, zero: those of all activations, one element each; None = each row has its own."""

    weight: ScaledWeight
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
