"""Products on Hopper give the same bits in many runs. A warp that read a tile too early or late would change some."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from baton_common.cores import available_cores
from baton_engine.compilation import compiling_ahead
from baton_kernels.grouped_linear import grouped_linear
from baton_kernels.hopper_few_numbers import few_numbers, few_numbers_candidates
from baton_kernels.hopper_few_rows import few_rows_candidates
from baton_kernels.hopper_numbers import hopper_numbers, hopper_scaled
from baton_kernels.kernel_configs import Product
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.grouped_linear import GroupedWeight
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight
from baton_kernels.unmeasured_hopper import CODES, NUMBERS, hopper_candidates, scaled_numbers

from .hopper import on_hopper

DEVICE = torch.device("cuda", 0)
# The weights do not fit into the L2 cache, and each program has many more steps than stages.
SHAPE = Product(8192, 28672, False)
RUNS = 60


def codes(kind: str, group: int, scales: torch.dtype) -> GroupedWeight:
    words = torch.randint(-(1 << 15), 1 << 15, (SHAPE.outputs, SHAPE.inner // 4), dtype=torch.int16, device=DEVICE)
    of_groups = torch.rand(SHAPE.outputs, SHAPE.inner // group, device=DEVICE) + 0.5
    if scales == torch.int16:
        pairs = torch.rand(SHAPE.outputs, SHAPE.inner // 16, device=DEVICE) + 0.5
        factors = torch.ones(SHAPE.outputs, device=DEVICE)
        return GroupedWeight(kind, words, pairs.to(torch.float8_e4m3fn).view(torch.int16), factors=factors)
    return GroupedWeight(kind, words, of_groups.to(scales))


def products(rows: int) -> Iterator[tuple[object, Callable[[], torch.Tensor]]]:
    """Yield each candidate for a number of rows with each kind of weights, and a function that computes it."""
    x = torch.randn(rows, SHAPE.inner, device=DEVICE).bfloat16()
    out = x.new_empty(rows, SHAPE.outputs)
    for weight in (codes("int4", 128, torch.bfloat16), codes("e2m1", 32, torch.int16)):
        for config in (*few_rows_candidates(rows, SHAPE), *hopper_candidates(CODES, rows, SHAPE, DEVICE)):
            yield (weight.kind, config), partial(grouped_linear, x, weight, None, False, config)
    numbers = torch.randn(SHAPE.outputs, SHAPE.inner, device=DEVICE)
    plain = numbers.bfloat16()
    for config in hopper_candidates(NUMBERS, rows, SHAPE, DEVICE):
        yield ("bf16", config), lambda config=config: hopper_numbers(x, plain, None, False, config, out).clone()
    some, few = plain[:256], out.new_empty(rows, 256)
    for config in few_numbers_candidates(rows, Product(*some.shape, False)):
        yield ("few bf16", config), lambda config=config: few_numbers(x, some, None, None, config, few).clone()
    for dtype in (torch.float8_e4m3fn, torch.int8):
        scales = torch.ones(SHAPE.outputs, 1, device=DEVICE)
        scaled = ScaledWeight((numbers * 20).to(dtype), scales, (1, SHAPE.inner))
        quantized = quantize_rows(x, RowFormat(dtype))
        for config in hopper_candidates(scaled_numbers(scaled), rows, SHAPE, DEVICE):
            run = partial(hopper_scaled, quantized, scaled, None, False)
            yield (dtype, config), lambda run=run, config=config: run(config, out).clone()


@on_hopper
def test_products_give_the_same_bits_in_many_runs() -> None:
    changed = []
    for rows in (1, 8, 16, 64, 300):
        cases = list(products(rows))
        with compiling_ahead(available_cores()):
            for _, run in cases:
                run()
        for what, run in cases:
            first = run()
            others = torch.stack([(run() != first).any() for _ in range(RUNS)])
            if others.any():
                changed.append((rows, what, int(others.sum())))
    assert not changed
