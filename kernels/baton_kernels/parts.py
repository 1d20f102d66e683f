"""Sums that several programs compute in parts (split-K). The program that finishes last adds up the parts."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def add_parts(acc, partial, arrivals, tile, part, PARTS: tl.constexpr):
    """Return the sum over the parts of a tile, and whether this program is the last and has the sum.

    acc: this program's part. partial: memory for all parts of all tiles, in acc's dtype. arrivals: as arrivals_of.
    """
    last = True
    if PARTS > 1:
        size: tl.constexpr = acc.shape[0] * acc.shape[1]
        cell = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        tl.store(partial + (tile * PARTS + part).to(tl.int64) * size + cell, acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == PARTS - 1
        if last:
            # Parts are added up by index, so that the order in which programs finish changes no sum.
            tl.store(arrivals + tile, 0)
            acc = tl.zeros_like(acc)
            for each in tl.static_range(0, PARTS):
                acc += tl.load(partial + (tile * PARTS + each).to(tl.int64) * size + cell, cache_modifier=".cg")
    return acc, last


@functools.cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """Return the device's counters of finished parts, zero between kernels: the program that counts last resets them.

    They are allocated once, since CUDA graphs keep their address.
    """
    return torch.zeros(4096, dtype=torch.int32, device=device)


def parts_for(tiles: int, steps: int, programs: int = 264) -> int:
    """Return into how many parts to cut sums of `steps` steps to get about two programs per multiprocessor."""
    return max(min(programs // tiles, steps, 8), 1)
