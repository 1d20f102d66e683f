"""Compiles kernels for Hopper on any machine, and prints the sizes of their code: of the prefill kernel for each shape
and variant, and of the products with one output.

Triton makes integers that are 1 into constants, which its interpreter does not.
"""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton_kernels.hopper_prefill import _hopper_prefill_kernel, hopper_prefill
from baton_kernels.linear import _one_row_kernel, _tiles_kernel, linear
from baton_kernels.reference.paged_attention import AttentionVariant
from baton_kernels.tuning import LinearConfig


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
    ints = torch.zeros(16, dtype=torch.int32)
    for dim, how in (
        (96, AttentionVariant(0.1, window=500, softcap=2.0, sinks=torch.zeros(4))),
        (256, AttentionVariant(0.1)),
    ):
        q, cache = torch.zeros(8, 4, dim, dtype=torch.bfloat16), torch.zeros(4, 64, 2, dim, dtype=torch.bfloat16)
        hopper_prefill(q, cache, cache, ints.view(4, 4), ints, ints, (ints, ints), how)
    for config in (LinearConfig(1, 1, 256, 1, 4, 1), LinearConfig(16, 16, 64, 2, 4, 3)):
        linear(torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(1, 256, dtype=torch.bfloat16), config=config)
    print([_sizes(_hopper_prefill_kernel), _sizes(_one_row_kernel), _sizes(_tiles_kernel)])


def _sizes(kernel: JITFunction) -> list[int]:
    """Return the bytes of code of each compiled variant."""
    return [len(compiled.asm["cubin"]) for compiled in kernel.device_caches[0][0].values()]


if __name__ == "__main__":
    main()
