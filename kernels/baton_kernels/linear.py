"""Matrix products of a few rows with a large weight, which take as long as reading the weight once.

There are two kernels here. For one row, each program multiplies the weights of a few outputs elementwise and adds up
the products. It may also compute the RMSNorm of the row. For more rows, tiles go through the tensor cores; the inner
dimension is cut into parts where there would be too few programs. On Hopper, hopper_numbers.py and, for up to 8 rows,
hopper_few_numbers.py have other kernels.
"""

import torch
import triton
import triton.language as tl

from .activation import gate_mul, gated
from .hopper_few_numbers import few_numbers, few_numbers_candidates
from .hopper_few_rows import ROWS
from .hopper_numbers import fits_hopper, hopper_numbers
from .kernel_configs import LinearConfig, Product
from .norm import computed
from .overlap import LINE, let_next_start, lines_ahead, overlap_options, prefetch, wait_for_inputs
from .parts import arrivals_of
from .reference.activation import GATES
from .reference.norm import PendingNorm
from .tuning import MOST_ROWS, linear_config
from .unmeasured import linear_candidates
from .unmeasured_hopper import DENSE, hopper_candidates
from .unmeasured_products import random_rows, watch


@triton.jit
def _values(x, residual, total, at, known, ADD: tl.constexpr):
    """Return a part of a row in float32. ADD: the row is the sum of x and the residual, which one program stores."""
    values = tl.load(x + at, mask=known, other=0.0)
    if ADD:
        added = values.to(tl.float32) + tl.load(residual + at, mask=known, other=0.0)
        values = added.to(values.dtype)
        tl.store(total + at, values, mask=known & (tl.program_id(0) == 0))
    return values.to(tl.float32)


@triton.jit
def _one_row_kernel(
    x, residual, total, norm, weight, bias, out, eps, outputs, INNER: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * INNER
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    known = inner < INNER
    real = (output < outputs)[:, None]
    at = weight + output.to(tl.int64)[:, None] * INNER + inner[None, :]
    up_at = at + tl.cast(outputs, tl.int64) * INNER
    w = tl.load(at, mask=real & known[None, :], other=0.0)
    if GATED:
        w_up = tl.load(up_at, mask=real & known[None, :], other=0.0)
    if NORM:
        scales = tl.load(norm + inner, mask=known, other=0.0)
    wait_for_inputs(OVERLAP)
    values = _values(x, residual, total, row + inner, known, ADD)
    if NORM:
        squares = values * values
        values *= scales.to(tl.float32)
    acc = w.to(tl.float32) * values[None, :]
    if GATED:
        acc_up = w_up.to(tl.float32) * values[None, :]
    for first in tl.static_range(BLOCK_INNER, INNER, BLOCK_INNER):
        known = first + inner < INNER
        w = tl.load(at + first, mask=real & known[None, :], other=0.0)
        values = _values(x, residual, total, row + first + inner, known, ADD)
        if NORM:
            squares += values * values
            values *= tl.load(norm + first + inner, mask=known, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * values[None, :]
        if GATED:
            acc_up += tl.load(up_at + first, mask=real & known[None, :], other=0.0).to(tl.float32) * values[None, :]
    # The norm's scale is applied to the results, so that no product waits for the sum of squares.
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / INNER + eps)
    result = tl.sum(acc, axis=1) * scale
    if BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    if GATED:
        result_up = tl.sum(acc_up, axis=1) * scale
        if BIAS:
            result_up += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
        result = gated(result, result_up, out.dtype.element_ty, GELU)
    at = out + tl.program_id(1).to(tl.int64) * outputs + output
    tl.store(at, result.to(out.dtype.element_ty), mask=output < outputs)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, weight, bias, out, partial, arrivals, rows, outputs, inner_size,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    up_at = w_at + tl.cast(outputs, tl.int64) * inner_size
    here = (row < rows)[None, :]
    # Offsets within a tile fit into 32 bits; the offset of its first row may not.
    x_at = x + first_row.to(tl.int64) * inner_size + (tl.arange(0, BLOCK_ROWS)[None, :] * inner_size + inner[:, None])
    if AHEAD > 0:
        elements: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        line = split * steps * BLOCK_INNER + tl.arange(0, AHEAD) * elements
        line = w_row[:, None] * inner_size + tl.minimum(line, inner_size - 1)[None, :]
        prefetch(weight + line)
        if GATED:
            prefetch(weight + tl.cast(outputs, tl.int64) * inner_size + line)
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
            acc = gated(acc, acc_up, out.dtype.element_ty, GELU)
        real = (output < outputs)[:, None] & (row < rows)[None, :]
        at = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=real)


def linear(
    x: torch.Tensor | PendingNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    out: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Compute linear_reference. x, weight and out are contiguous and of one dtype. config: None = the fastest known."""
    before = x.x if isinstance(x, PendingNorm) else x
    rows, inner = before.shape
    if config is None and before.element_size() == 2:
        watch(_NUMBERS, weight, Product(weight.shape[0], inner, gate is not None))
        config = linear_config(rows, weight.shape[0], inner, gate is not None, before.device)
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    if config is not None and config.block_rows == 1:
        out = before.new_empty(rows, outputs) if out is None else out
        _one_row(x, weight, bias, gate, out, config)
        return out
    x = computed(x)
    if config is None:
        return by_cublas(x, weight, bias, gate, out)
    if out is None:
        out = x.new_empty(rows, outputs)
    if config.hopper and config.block_rows == ROWS:
        return few_numbers(x, weight, bias, gate, config, out)
    if config.hopper:
        return hopper_numbers(x, weight, bias, gate is not None, config, out, gate=gate or "silu")
    tiles = triton.cdiv(outputs, config.block_outputs) * triton.cdiv(rows, config.block_rows)
    partial, arrivals = out, out
    if config.splits > 1:
        cells = tiles * config.splits * config.block_outputs * config.block_rows * (1 if gate is None else 2)
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
        arrivals = arrivals_of(x.device)
        if tiles > len(arrivals):
            raise ValueError(f"{config} cuts {tiles} tiles into parts; the limit is {len(arrivals)} tiles")
    ahead = lines_ahead(outputs, inner * weight.element_size(), gate is not None, config, x.device)
    _tiles_kernel[(tiles, config.splits)](
        x, weight, weight if bias is None else bias, out, partial, arrivals, rows, outputs, inner,
        BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=config.block_inner,
        SPLITS=config.splits, AHEAD=ahead, EVEN=inner % (config.block_inner * config.splits) == 0,
        num_warps=config.num_warps, num_stages=config.num_stages, **_flags(bias, gate), **overlap_options(x.device),
    )  # fmt: skip
    return out


def by_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute linear_reference with torch's product (cuBLAS)."""
    if gate is not None:
        result = gate_mul(torch.nn.functional.linear(x, weight, bias), gate)
        return result if out is None else out.copy_(result)
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class _Numbers:
    """Implements Kind for weights of 16 bits."""

    rows, trusted = (1, 8, 16, 32, 64, MOST_ROWS), None

    def numbers(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def format(self, weight: torch.Tensor) -> str:
        return ""

    def candidates(self, weight: torch.Tensor, shape: Product, rows: int) -> list[LinearConfig | None]:
        found: list[LinearConfig | None] = [None]
        if rows < MOST_ROWS:
            found = linear_candidates(rows, *shape, weight.device)
        if rows > 1 and fits_hopper(weight):
            # Beside the other kernels of a step, that for few rows is faster than those with TMA that are faster alone.
            found += few_numbers_candidates(rows, shape) or hopper_candidates(DENSE, rows, shape, weight.device)
        return found

    def inputs(self, weight: torch.Tensor, shape: Product, rows: int) -> torch.Tensor:
        return random_rows(rows, shape.inner, weight.dtype, weight.device)

    def compute(
        self, weight: torch.Tensor, shape: Product, inputs: torch.Tensor, config: LinearConfig | None
    ) -> torch.Tensor:
        x, gate = inputs, "silu" if shape.gated else None
        return by_cublas(x, weight, gate=gate) if config is None else linear(x, weight, gate=gate, config=config)


_NUMBERS = _Numbers()


def _one_row(
    x: torch.Tensor | PendingNorm, weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None,
    out: torch.Tensor, config: LinearConfig,
) -> None:  # fmt: skip
    """Compute linear_reference into out, each row on its own."""
    norm = x if isinstance(x, PendingNorm) else PendingNorm(x, None, x, 0.0, x)
    rows, inner = norm.x.shape
    _one_row_kernel[(triton.cdiv(out.shape[1], config.block_outputs), rows)](
        norm.x, norm.x if norm.residual is None else norm.residual, norm.total, norm.weight, weight,
        weight if bias is None else bias, out, norm.eps, out.shape[1], INNER=inner, BLOCK_OUTPUTS=config.block_outputs,
        BLOCK_INNER=config.block_inner, NORM=norm is x, ADD=norm.residual is not None, num_warps=config.num_warps,
        **_flags(bias, gate), **overlap_options(out.device),
    )  # fmt: skip


def _flags(bias: torch.Tensor | None, gate: str | None) -> dict[str, bool]:
    assert gate is None or gate in GATES, gate
    return {"GATED": gate is not None, "GELU": gate == "gelu_tanh", "BIAS": bias is not None}


# Full tiles for large batches, and enough programs for the narrow outputs of small models.
_FIXED = LinearConfig(64, 64, 64, 1, 4, 4)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute linear_reference such that the bits of a row's result do not depend on the other rows."""
    return linear(x, weight, bias, gate, out, _FIXED)
