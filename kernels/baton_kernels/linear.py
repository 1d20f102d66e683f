"""Matrix products of a few rows with a large weight, which take as long as reading the weight once.

There are two kernels. For one row, each program multiplies the weights of a few outputs elementwise and sums. For more
rows, tiles go through the tensor cores; the inner dimension is cut into parts where there would be too few programs.
"""

import functools

import torch
import triton
import triton.language as tl

from .activation import gate_mul, silu_mul
from .overlap import let_next_start, overlap_options, prefetch, wait_for_inputs
from .tuning import LinearConfig, linear_config

# Elements of each output's weights that are prefetched while the preceding kernel still runs.
_AHEAD = 512


@triton.jit
def _one_row_kernel(
    x, weight, bias, out, outputs, INNER: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    real = (output < outputs)[:, None]
    at = weight + output.to(tl.int64)[:, None] * INNER + inner[None, :]
    up_at = at + outputs.to(tl.int64) * INNER
    w = tl.load(at, mask=real & (inner < INNER)[None, :], other=0.0)
    if GATED:
        w_up = tl.load(up_at, mask=real & (inner < INNER)[None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * INNER + inner, mask=inner < INNER, other=0.0).to(tl.float32)[None, :]
    acc = w.to(tl.float32) * values
    if GATED:
        acc_up = w_up.to(tl.float32) * values
    for first in tl.static_range(BLOCK_INNER, INNER, BLOCK_INNER):
        known = first + inner < INNER
        w = tl.load(at + first, mask=real & known[None, :], other=0.0)
        values = tl.load(x + row * INNER + first + inner, mask=known, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * values
        if GATED:
            acc_up += tl.load(up_at + first, mask=real & known[None, :], other=0.0).to(tl.float32) * values
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    if GATED:
        result_up = tl.sum(acc_up, axis=1)
        if BIAS:
            result_up += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
        result = silu_mul(result, result_up, out.dtype.element_ty)
    tl.store(out + row * outputs + output, result.to(out.dtype.element_ty), mask=output < outputs)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, weight, bias, out, partial, arrivals, rows, outputs, inner_size,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    output = (tile // row_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    first_row = (tile % row_tiles) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    # Outputs beyond the last one read its weights, so that loads need no mask. Their results are not stored.
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    steps = tl.cdiv(inner_size, BLOCK_INNER * SPLITS)
    inner = split * steps * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    up_at = w_at + outputs.to(tl.int64) * inner_size
    here = (row < rows)[None, :]
    # Offsets within a tile fit into 32 bits; the offset of its first row may not.
    x_at = x + first_row.to(tl.int64) * inner_size + (tl.arange(0, BLOCK_ROWS)[None, :] * inner_size + inner[:, None])
    if OVERLAP and AHEAD > 0:
        line = split * steps * BLOCK_INNER + tl.arange(0, AHEAD // 64) * 64
        line = w_row[:, None] * inner_size + tl.minimum(line, tl.maximum(inner_size - 64, 0))[None, :]
        prefetch(weight + line)
        if GATED:
            prefetch(weight + outputs.to(tl.int64) * inner_size + line)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for step in range(0, steps):
        if EVEN:
            w = tl.load(w_at)
            values = tl.load(x_at, mask=here, other=0.0)
        else:
            known = inner + step * BLOCK_INNER < inner_size
            w = tl.load(w_at, mask=known[None, :], other=0.0)
            values = tl.load(x_at, mask=known[:, None] & here, other=0.0)
        acc = tl.dot(w, values, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w_up = tl.load(up_at)
            else:
                w_up = tl.load(up_at, mask=(inner + step * BLOCK_INNER < inner_size)[None, :], other=0.0)
            acc_up = tl.dot(w_up, values, acc_up, input_precision="ieee")
        w_at += BLOCK_INNER
        up_at += BLOCK_INNER
        x_at += BLOCK_INNER

    last = True
    if SPLITS > 1:
        size: tl.constexpr = BLOCK_OUTPUTS * BLOCK_ROWS
        halves: tl.constexpr = 2 if GATED else 1
        cell = tl.arange(0, BLOCK_OUTPUTS)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        mine = partial + (tile * SPLITS + split).to(tl.int64) * size * halves + cell
        tl.store(mine, acc)
        if GATED:
            tl.store(mine + size, acc_up)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            # The program that finishes last adds up all parts by index: their order of finishing changes no sum.
            tl.store(arrivals + tile, 0)
            acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
            acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
            for part in tl.static_range(0, SPLITS):
                at = partial + (tile * SPLITS + part).to(tl.int64) * size * halves + cell
                acc += tl.load(at, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(at + size, cache_modifier=".cg")
    if last:
        if BIAS:
            acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                acc_up += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
            acc = silu_mul(acc, acc_up, out.dtype.element_ty)
        real = (output < outputs)[:, None] & (row < rows)[None, :]
        at = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=real)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Compute linear_reference. x, weight and out are contiguous and of one dtype. config: None = the fastest known."""
    rows, inner = x.shape
    if config is None and x.element_size() == 2:
        config = linear_config(rows, weight.shape[0], inner, gated, x.device)
    if config is None:
        if gated:
            result = gate_mul(torch.nn.functional.linear(x, weight, bias), "silu")
            return result if out is None else out.copy_(result)
        if out is None:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = x.new_empty(rows, outputs)
    options = overlap_options(x.device)
    flags = {"GATED": gated, "BIAS": bias is not None}
    output_tiles = triton.cdiv(outputs, config.block_outputs)
    if config.block_rows == 1:
        _one_row_kernel[(output_tiles, rows)](
            x, weight, weight if bias is None else bias, out, outputs, INNER=inner,
            BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=config.block_inner,
            num_warps=config.num_warps, **flags, **options,
        )  # fmt: skip
        return out
    tiles = output_tiles * triton.cdiv(rows, config.block_rows)
    partial, arrivals = out, out
    if config.splits > 1:
        cells = tiles * config.splits * config.block_outputs * config.block_rows * (2 if gated else 1)
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
        arrivals = arrivals_of(x.device)
        if tiles > len(arrivals):
            raise ValueError(f"{config} cuts {tiles} tiles into parts; the limit is {len(arrivals)} tiles")
    _tiles_kernel[(tiles, config.splits)](
        x, weight, weight if bias is None else bias, out, partial, arrivals, rows, outputs, inner,
        BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=config.block_inner,
        SPLITS=config.splits, AHEAD=_AHEAD, EVEN=inner % (config.block_inner * config.splits) == 0,
        num_warps=config.num_warps, num_stages=config.num_stages, **flags, **options,
    )  # fmt: skip
    return out


# Full tiles for large batches, and enough programs for the narrow outputs of small models.
_FIXED = LinearConfig(64, 64, 64, 1, 4, 4)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute linear_reference such that the bits of a row's result do not depend on the other rows."""
    return linear(x, weight, bias, gated, out, _FIXED)


@functools.cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """Return the device's counters of finished parts, zero between kernels: the program that counts last resets them.

    They are allocated once, since CUDA graphs keep their address.
    """
    return torch.zeros(4096, dtype=torch.int32, device=device)
