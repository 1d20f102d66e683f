"""Where the latents of tokens lie in the paged cache."""

import torch


def row_stride(latents: torch.Tensor) -> int:
    """Return the elements from the latent of a token to that of the next one. Where layers have latents of different
    sizes, each has the beginning of a row with room for the largest.

    latents: [blocks, block_size, 1, rank + rope_dim].
    """
    return latents.stride(0) // latents.shape[1]
