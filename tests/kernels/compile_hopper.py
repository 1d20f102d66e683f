"""Compiles the prefill kernel for Hopper on any machine, and prints the size of its code for each shape and variant."""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton_kernels import hopper_prefill as kernel
from baton_kernels.reference.paged_attention import AttentionVariant


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
    kernel._multiprocessors = lambda device: 132
    run = JITFunction.run
    JITFunction.run = lambda *arguments, warmup, **options: run(*arguments, warmup=True, **options)
    ints = torch.zeros(16, dtype=torch.int32)
    for dim, how in (
        (96, AttentionVariant(0.1, window=500, softcap=2.0, sinks=torch.zeros(4))),
        (256, AttentionVariant(0.1)),
    ):
        q, cache = torch.zeros(8, 4, dim, dtype=torch.bfloat16), torch.zeros(4, 64, 2, dim, dtype=torch.bfloat16)
        kernel.hopper_prefill(q, cache, cache, ints.view(4, 4), ints, ints, (ints, ints), how)
    print([len(kernel.asm["cubin"]) for kernel in kernel._hopper_prefill_kernel.device_caches[0][0].values()])


if __name__ == "__main__":
    main()
