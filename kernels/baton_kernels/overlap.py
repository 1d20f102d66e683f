"""Programmatic dependent launch: a kernel starts while the preceding one still runs, and waits for it only if it must.

A kernel that is launched with `overlap_options` calls `wait_for_inputs` before it reads memory that an earlier kernel
writes, and before it writes memory that one reads. Its work before that call, such as fetching weights, overlaps with
the earlier kernel.

A kernel of a layer may also read the step's own data before that call: positions, slots, block tables and the plan of
attention. Between the kernels that write these and the first layer there is one of torch, which starts when all earlier
kernels have ended (Decoder.begin).
"""

import functools

import torch
import triton
import triton.language as tl

from .kernel_configs import LinearConfig

LINE = tl.constexpr(128)  # bytes of a cache line
# Bytes of weights that all programs of a kernel together prefetch. The memory delivers them while the small kernels
# between two products run, and they take a part of the L2 cache.
_AHEAD_BYTES = 8 << 20


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the cache lines at `pointers` into L2. This is a hint: no instruction waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def lines_ahead(outputs: int, row_bytes: int, gated: bool, config: LinearConfig, device: torch.device) -> int:
    """Return how many cache lines of each row of weights a program of a product prefetches: a power of two, or none.

    outputs: of the product. row_bytes: the bytes of one output's weights. gated: each output has weights of a gate and
    of an up.
    """
    if not overlap_options(device)["OVERLAP"]:
        return 0
    # This is the number of programs for few tokens, so that one compiled kernel serves any number of tokens.
    programs = triton.cdiv(outputs, config.block_outputs) * config.splits
    # Others begin when these have ended.
    at_once = min(programs, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
    rows = config.block_outputs * (2 if gated else 1)
    lines = min(_AHEAD_BYTES // (at_once * rows), row_bytes // config.splits) // LINE.value
    return 1 << lines.bit_length() - 1 if lines else 0


@functools.cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with an OVERLAP parameter. Hopper and later GPUs overlap kernels."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
