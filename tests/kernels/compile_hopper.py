"""Compiles kernels for Hopper on any machine, and prints the sizes of their code: `prefill`, `codes`,
`few_rows`, `few_numbers` or `numbers`."""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton_kernels import (
    hopper_codes,
    hopper_few_numbers,
    hopper_few_rows,
    hopper_numbers,
    hopper_prefill,
    hopper_products,
)
from baton_kernels.hopper_products import Pairs
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.pair_groups import PairGroups
from baton_kernels.reference.activation import ClampedGate, LimitedGate, NoGate
from baton_kernels.reference.grouped_linear import GroupedWeight
from baton_kernels.reference.paged_attention import AttentionVariant
from baton_kernels.reference.quantize import QuantizedRows
from baton_kernels.reference.scaled_linear import ScaledWeight

BF16 = torch.bfloat16


def prefill() -> JITFunction:
    hopper_prefill._multiprocessors = lambda device: 132
    ints = torch.zeros(16, dtype=torch.int32)
    for dim, how in (
        (96, AttentionVariant(0.1, window=500, softcap=2.0, sinks=torch.zeros(4))),
        (256, AttentionVariant(0.1)),
        (128, AttentionVariant(0.1, window=8192, chunked=True)),
    ):
        q, cache = torch.zeros(8, 4, dim, dtype=BF16), torch.zeros(4, 64, 2, dim, dtype=BF16)
        hopper_prefill.hopper_prefill(q, cache, cache, ints.view(4, 4), ints, ints, (ints, ints), how)
    return hopper_prefill._hopper_prefill_kernel


def weight(kind: str, *shape: int, group: int = 128, scales: torch.dtype = BF16) -> GroupedWeight:
    *outer, columns = shape
    zeros = torch.zeros(*outer, columns // group, dtype=torch.uint8) if scales == torch.float16 else None
    return GroupedWeight(
        kind, torch.zeros(*outer, columns // 4, dtype=torch.int16),
        torch.zeros(*outer, columns // group, dtype=scales), zeros,
        factors=torch.zeros(outer) if scales == torch.int16 else None,
    )  # fmt: skip


def codes() -> JITFunction:
    compute, ints = hopper_codes.hopper_codes, torch.zeros(64, dtype=torch.int32)
    x, plain = torch.zeros(16, 4096, dtype=BF16), weight("int4", 512, 4096)
    compute(x, plain, None, True, LinearConfig(16, 128, 256, 1, 8, 4), x)
    compute(x, plain, None, False, LinearConfig(16, 64, 256, 4, 4, 4), x)
    compute(x, plain, None, False, LinearConfig(256, 128, 64, 1, 8, 5), x)
    half = x.half()
    compute(
        half, weight("int4", 512, 4096, scales=torch.float16), half[0], False, LinearConfig(64, 256, 128, 2, 8, 6), x
    )
    compute(x, weight("int4", 512, 4096, scales=torch.float16), None, False, LinearConfig(32, 128, 256, 1, 4, 3), x)
    compute(
        x, weight("e2m1", 512, 4096, group=32, scales=torch.int16), None, True, LinearConfig(16, 128, 256, 1, 8, 4), x
    )
    compute(
        x, weight("e2m1", 512, 4096, group=32, scales=torch.int16), None, False, LinearConfig(16, 64, 128, 1, 4, 4), x
    )
    groups, experts = PairGroups(ints, ints[:4]), weight("e2m1", 3, 64, 2880, group=32, scales=torch.uint8)
    x, clamp = torch.zeros(64, 2880, dtype=BF16), ClampedGate(1.7, 7.0)
    compute(x, experts, x[:3, :64], True, LinearConfig(16, 128, 256, 1, 8, 4), x, Pairs(groups, gate=clamp))
    compute(x, experts, None, False, LinearConfig(16, 64, 256, 1, 4, 4), x, Pairs(groups, True))
    return hopper_products._hopper_kernel


def few_rows() -> JITFunction:
    compute, tiles = hopper_few_rows.few_rows_codes, LinearConfig(1, 16, 1024, 1, 4, 4, hopper=True)
    x, plain = torch.zeros(2, 4096, dtype=BF16), weight("int4", 512, 4096)
    for each in hopper_few_rows.few_rows_candidates(1, Product(512, 4096, False)):
        compute(x, plain, None, False, each, x[:, :512])
    compute(x.half(), weight("int4", 512, 4096, scales=torch.float16), x[0].half(), True, tiles, x[:, :256].half())
    compute(x, weight("int4", 512, 4096, group=32, scales=torch.float16), None, False, tiles, x[:, :512])
    compute(x, weight("e2m1", 512, 4096, group=32, scales=torch.int16), None, True, tiles, x[:, :256])
    x = torch.zeros(2, 2880, dtype=BF16)
    compute(x, weight("e2m1", 512, 2880, group=32, scales=torch.uint8), x[0], False, tiles, x[:, :512])
    return hopper_few_rows._few_rows_kernel


def few_numbers() -> JITFunction:
    hopper_few_numbers.lines_ahead = lambda *_: 8
    compute, product = hopper_few_numbers.few_numbers, Product(1024, 4096, False)
    x, weight = torch.zeros(8, 4096, dtype=BF16), torch.zeros(1024, 4096, dtype=BF16)
    for each in hopper_few_numbers.few_numbers_candidates(8, product):
        compute(x, weight, None, None, each, x[:, :1024])
    tiles = LinearConfig(8, 16, 1024, 1, 8, 2, hopper=True)
    compute(x, weight, None, "silu", tiles, x[:, :512])
    compute(x, weight, x[0], "gelu_tanh", tiles, x[:, :512])
    x, weight = x.half()[:, :2888].contiguous(), weight.half()[:, :2888].contiguous()
    compute(x, weight, x[0], None, tiles, x[:, :1024])
    return hopper_few_numbers._few_numbers_kernel


def numbers() -> JITFunction:
    multiply, ints = hopper_numbers.hopper_numbers, torch.zeros(64, dtype=torch.int32)
    groups = PairGroups(ints, ints[:4])
    gates, results = Pairs(groups, gate=ClampedGate(1.7, 7.0)), Pairs(groups, True)
    x, weight = torch.zeros(64, 2880, dtype=BF16), torch.zeros(3, 512, 2880, dtype=BF16)
    for rows, outputs, inner, warps in ((16, 64, 128, 4), (64, 256, 64, 8), (128, 256, 64, 8)):
        tiles = LinearConfig(rows, outputs, inner, 1, warps, 4)
        multiply(x, weight, x[:3, :512], True, tiles, x[:, :256], gates)
        multiply(x, weight, None, True, tiles, x[:, :256], Pairs(groups, gate=LimitedGate(7.0)))
        multiply(x, weight, None, False, tiles, x[:, :512], results)
    tiles = LinearConfig(16, 64, 128, 1, 4, 4)
    for gate in ("gelu", "quick_gelu", "relu2"):
        multiply(x, weight, None, True, tiles, x[:, :256], Pairs(groups, gate=gate))
        multiply(x, weight, None, False, tiles, x[:, :512], Pairs(groups, gate=NoGate(gate)))
    multiply(x.half(), weight[0].half(), None, False, LinearConfig(256, 128, 64, 2, 8, 4), x[:, :512].half())
    fp8 = torch.float8_e4m3fn
    for dtype, tile in ((fp8, (1, 4096)), (fp8, (128, 128)), (torch.int8, (1, 4096))):
        codes = torch.zeros(512, 4096, dtype=dtype)
        scales = torch.ones(512 // tile[0], 4096 // tile[1])
        sums, zeros = (ints.repeat(8), ints) if dtype == torch.int8 else (None, None)
        scaled = ScaledWeight(codes, scales, tile, sums)
        quantized = QuantizedRows(codes[:64], torch.ones(64, scales.shape[1]), zeros)
        for rows, warps, parts in ((16, 8, 2), (64, 4, 1), (128, 8, 1)):
            tiles = LinearConfig(rows, 128, 128, parts, warps, 4)
            hopper_numbers.hopper_scaled(quantized, scaled, x[0], False, tiles, x[:, :512])
            hopper_numbers.hopper_scaled(quantized, scaled, None, True, tiles, x[:, :256])
    return hopper_products._hopper_kernel


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    # There is no device that could load the code.
    CompiledKernel._init_handles = lambda _: None
    run = JITFunction.run
    JITFunction.run = lambda *arguments, warmup, **options: run(*arguments, warmup=True, **options)
    kernel = {each.__name__: each for each in (prefill, codes, few_rows, few_numbers, numbers)}[sys.argv[1]]()
    compiled = kernel.device_caches[0][0].values()
    print([len(each.asm["cubin"]) for each in compiled])


if __name__ == "__main__":
    main()
