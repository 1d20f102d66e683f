"""Runs Gluon kernels with torch in place of its operations on tensors, as Gluon has no interpreter. Its compiler checks
that the layouts of a kernel agree with these operations (compile_hopper.py)."""

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


class Value(torch.Tensor):
    """A tensor of a kernel. Its layout does not matter here."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Pointer:
    """A tensor, and indices of its elements."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at, self.dtype = tensor, at, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.at + other)


class Gluon:
    """The functions of gluon.language that the kernel calls, and one program's index."""

    int16, int32, int64, uint8, float32 = torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32
    minimum = staticmethod(lambda values, most: values.clamp(max=most))

    def __init__(self, program: tuple[int, int]) -> None:
        self.program_id = program.__getitem__

    def __getattr__(self, name: str) -> Any:
        assert name.endswith("Layout"), name
        return lambda *_: None

    def arange(self, first: int, last: int, layout: None) -> torch.Tensor:
        return torch.arange(first, last).as_subclass(Value)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: None) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype).as_subclass(Value)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: None) -> torch.Tensor:
        return self.full(shape, 0, dtype, layout)

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other), dim=-1)

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return both.unbind(-1)

    def sum(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.sum(axis)

    def convert_layout(self, values: torch.Tensor, layout: None, assert_trivial: bool = False) -> torch.Tensor:
        return values

    def load(self, at: "Pointer", mask: Any = True, other: float = 0, cache_modifier: str = "") -> torch.Tensor:
        index, mask = torch.broadcast_tensors(at.at, torch.as_tensor(mask))
        # An index outside the tensor is an error only where it is loaded.
        values = at.tensor.flatten()[torch.where(mask, index, 0)]
        return torch.where(mask, values, torch.tensor(other, dtype=values.dtype)).as_subclass(Value)

    def store(self, at: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        at.tensor.view(-1)[at.at[mask]] = values[mask]


def gated(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, gelu: bool) -> torch.Tensor:
    return (torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)) * up


class Launcher:
    """Runs a kernel for each of its programs.

    functions: those that the kernel calls, directly or not, by their names there. names: what its other names mean.
    """

    def __init__(self, kernel: Any, functions: dict[str, Any], module: ModuleType, **names: Any) -> None:
        self._kernel, self._functions = kernel, functions
        constants = {
            name: value.value
            for name, value in vars(module).items()
            if name.isupper() or name[1:].isupper()
            if hasattr(value, "value")
        }
        waits = dict.fromkeys(("let_next_start", "wait_for_inputs", "prefetch"), lambda *_: None)
        layouts = {name: lambda *_: None for name in vars(module) if name.endswith("_layout")}
        product = {"mma_v2": lambda a, b, acc: acc + a @ b.double(), "gated": gated}
        self._names = {**vars(module), **constants, **waits, **layouts, **product, **names}

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return lambda *arguments, **options: self._run(grid, arguments, **options)

    def _run(self, grid: tuple[int, int], arguments: tuple[Any, ...], **options: Any) -> None:
        flags = {name: value for name, value in options.items() if name.isupper()}
        assert options.keys() - flags.keys() == {"num_warps", "maxnreg", "launch_pdl"}
        pointers = [Pointer(each) if isinstance(each, torch.Tensor) else each for each in arguments]
        for program in ((one, two) for one in range(grid[0]) for two in range(grid[1])):
            names = {**self._names, "gl": Gluon(program)}
            for name, function in self._functions.items():
                names[name] = FunctionType(function.fn.__code__, names)
            FunctionType(self._kernel.fn.__code__, names)(*pointers, **flags)
