"""Attention as in triton_paged.py, with chunks through the kernel that is written for Hopper."""

import torch

from baton_kernels.hopper_prefill import hopper_prefill
from baton_kernels.prefill_cuts import TileCuts
from baton_kernels.reference.paged_attention import AttentionVariant

from .triton_paged import Tiles, TritonPaged


class HopperPaged(TritonPaged):
    """Decodes, and steps with tiles that are cut, go through the kernels of TritonPaged."""

    name = "hopper"
    # With fewer parts, whole tiles use enough of the device for this kernel to be faster than TritonPaged's with parts.
    _least_parts = 4

    def _attend_tiles(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        tiles: Tiles,
        variant: AttentionVariant,
        out: torch.Tensor,
        scales: torch.Tensor | None,
        cuts: TileCuts | None,
    ) -> None:
        if cuts is None:
            hopper_prefill(q, keys, values, tables, self._lengths, self._starts, tiles, variant, out)
        else:
            super()._attend_tiles(q, keys, values, tables, tiles, variant, out, scales, cuts)
