"""Several kinds of latent attention through our Triton kernels."""

from typing import cast

import torch

from .backend import GraphBackend
from .latents_by_layer import LatentsByLayer
from .triton_indexed import TritonIndexed
from .triton_latent import TritonLatent


class TritonLatentsByLayer(LatentsByLayer):
    name = "triton"
    kind = TritonLatent
    selecting_kind = TritonIndexed

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        for backend in self._backends.values():
            cast(GraphBackend, backend).use_rows(tables, rows, lengths)
