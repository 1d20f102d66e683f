"""Which variants of kernels an engine compiles at start, and which only while it serves: kernel_variants.py CASES.

CASES is a JSON list of [name, folder of a model, settings of the engine]. The script prints by name how many variants
were compiled at start, and those that were compiled later.

A GPU's runner runs on the CPU with Triton's own launch code, up to the point where a variant is compiled or launched.
So arguments are specialized as on a GPU, by type, alignment and value. Each variant is translated to Triton's
intermediate language, in which errors show that its interpreter does not find: it makes no integer that is 1 into a
constant. Kernels compute nothing, and memory that they should fill holds zeros.
"""

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from baton_engine import cuda_runner, token_graphs
from baton_engine.attention import select
from baton_engine.compilation import Compilations, compiling_ahead
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.measured_steps import measured_steps
from baton_engine.warm_up import warm_up_steps
from baton_kernels import hopper_prefill, tuning
from baton_kernels.norm import _add_rms_norm_kernel, add_rms_norm
from tests.engine import fake_cuda
from tests.engine.harness import Transcript, finish, make_prompt, make_request

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 7, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 0.8, "logit_bias": {5: 3.0}, "bad_words": [[5, 5], [9]], "n": 3},
    {"temperature": 0.0, "prompt_logprobs": 1},
]
REQUESTS = 60


class Driver:
    """The driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


class Variants:
    """seen: the variants of kernels that were compiled, as (kernel, key)."""

    _translated: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def compile(
        self, kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, _: bool
    ) -> Compiled:
        variant = f"{kernel.__module__}.{kernel.__name__}", key
        self.seen.append(variant)
        if variant not in self._translated:
            self._translated.add(variant)
            _, _, target, backend, _ = kernel.device_caches[device]
            translate(kernel.ASTSource(kernel, signature, constants, attributes), target, backend, options)
        compiled = kernel.device_caches[0][0][key] = Compiled()
        return compiled


def translate(source: Any, target: GPUTarget, backend: Any, options: Any) -> None:
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


class Measured(dict[str, Any]):
    """A table in which each product, or each layer of experts, has other tiles for each class of rows or tokens."""

    def __init__(self, format: str, device: torch.device, experts: bool = False) -> None:
        self._format, self._experts = format, experts

    def get(self, name: str, default: Any = None) -> Any:
        if not self._experts:
            block, inner = (64, 128) if self._format else (16, 16)
            return {str(rows): [rows, block, inner, 1 + rows % 3, 4, 2] for rows in (1, 16, 32, 64, 128)}
        least = 16 if self._format else 1
        sizes = {1: least, 4: 16, 32: 32, 128: 64, 512: 128}
        return {str(most): [rows, [32, 64, 4, 2 + rows % 3], [64, 64, 4, 2]] for most, rows in sizes.items()}


def zeros(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, **options: make(*arguments, **options).zero_()


def pretend() -> None:
    """Let engines on this CPU take it for a GPU."""
    for name in ("empty", "empty_like"):
        setattr(torch, name, zeros(getattr(torch, name)))
    torch.Tensor.new_empty = zeros(torch.Tensor.new_empty)
    torch.cuda.Event = fake_cuda.Event
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    tuning._table = Measured
    hopper_prefill._multiprocessors = lambda _: 132
    select._why_not_triton = lambda *_: None
    select._is_hopper = lambda _: True
    cuda_runner.Recorder = fake_cuda.Recorder
    token_graphs._seconds = lambda run: (run(), 1.0)[1]  # graphs of tokens are not faster: most steps have none
    sys.modules["baton_engine.engine"].make_runner = fake_cuda.make_runner


def serve(engine: Engine, seed: int) -> None:
    """Run requests of all kinds and lengths, which arrive while others run, and hand KV over."""
    rng, transcript = random.Random(seed), Transcript()
    longest = engine.max_model_len - 40
    for id in range(REQUESTS):
        length = rng.choice([1, 2, 3, rng.randint(4, 40), rng.randint(40, 300), rng.randint(1, longest)])
        fields = dict(rng.choice(KINDS))
        if fields.get("n", 1) > engine.config.max_num_seqs:
            fields["n"] = 1
        request = make_request(
            id, make_prompt(min(length, longest), seed=rng.choice([0, id])), rng.randint(1, 30), **fields
        )
        engine.add(request)
        for _ in range(rng.choice([0, 0, 1, 5])):
            transcript.take(engine.step().deltas)
    finish(engine, transcript)
    assert len(transcript.reasons) >= REQUESTS
    cache = engine.runner.cache
    for extent in (cache.layout.extent(0, 1), cache.layout.extent(3, 40)):
        values = torch.zeros(cache.layout.size(extent), dtype=torch.uint8)
        tables = [[1, 0, 3, 2] * 16] * len(cache.layout.groups)
        cache.gather(tables, extent, values, check=True)
        cache.scatter(tables, extent, values)


def forget_kernels() -> None:
    for thing in gc.get_objects():
        if isinstance(thing, JITFunction):
            thing.device_caches.clear()


def measure(folder: str, settings: dict[str, Any], warm_up: bool) -> dict[str, Any]:
    variants = Variants()
    JITFunction._do_compile = lambda *facts: variants.compile(*facts)
    forget_kernels()
    cuda_runner.warm_up_steps = warm_up_steps if warm_up else lambda *_: []
    cuda_runner.measured_steps = measured_steps if warm_up else lambda *_: []
    engine = Engine(EngineConfig(model=folder, device="cpu", num_threads=1, dtype="bfloat16", **settings))
    ahead = len(variants.seen)
    serve(engine, seed=1)
    return {"ahead": ahead, "late": variants.seen[ahead:]}


def compile_ahead() -> dict[str, Any]:
    """Compile a kernel really, for a GPU that is not there."""
    forget_kernels()
    compilations = Compilations()
    compilations.begin()
    x, weight = torch.zeros(2, 64), torch.ones(64)
    with compiling_ahead(2):
        for size in (32, 64):
            add_rms_norm(x[:, :size].contiguous(), None, weight[:size], 1e-6)
    kernels = list(_add_rms_norm_kernel.device_caches[0][0].values())
    counted = compilations.count
    with compiling_ahead(1):
        add_rms_norm(x, None, weight, 1e-6)
    return {"binaries": [len(kernel.asm["cubin"]) for kernel in kernels], "counted": [counted, compilations.count]}


def main(cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Driver())
    found: dict[str, Any] = {"compile_ahead": compile_ahead()}
    pretend()
    for name, folder, settings in cases:
        found[name] = measure(folder, settings, warm_up=name != "without warm-up")
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
