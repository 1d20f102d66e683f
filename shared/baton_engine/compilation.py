"""Compilation of Triton kernels: ahead of their first launch, in threads, and counted once an engine serves."""

import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

_MOST_THREADS = 16  # each takes some hundred megabytes


@contextmanager
def compiling_ahead(cores: float) -> Iterator[None]:
    """Within this context, launching a kernel only compiles it, in threads, one for each core. All kernels are ready
    when the context ends.

    All other operations run. As the results of kernels are undefined here, they must not be used as indices.
    """
    run, start = JITFunction.run, JITFunction._do_compile
    begun: set[tuple[int, str]] = set()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    def start_once(kernel: Any, key: str, *rest: Any) -> Any:
        # Triton 3.6 caches a kernel only once it is compiled, and would prepare it again at each launch until then.
        if (id(kernel), key) in begun:
            return None
        begun.add((id(kernel), key))
        return start(kernel, key, *rest)

    with ThreadPoolExecutor(min(math.ceil(cores), _MOST_THREADS), "compile") as pool, AsyncCompileMode(pool):
        JITFunction.run, JITFunction._do_compile = compile_only, start_once
        try:
            yield
        finally:
            JITFunction.run, JITFunction._do_compile = run, start


class Compilations:
    """Counts the kernels that are compiled, or loaded from Triton's cache on disk, from `begin` on. The engine stands
    still during each of these."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *, fn: Any, repr: str, **_: Any) -> None:
        self.count += 1
        log.warning(
            "kernel %s was compiled while the engine serves", fn.name,
            extra={"event": "compiled_late", "kernel": fn.name, "variant": repr},
        )  # fmt: skip
