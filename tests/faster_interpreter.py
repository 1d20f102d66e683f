"""Makes Triton's interpreter several times as fast. What kernels compute stays the same."""

from dataclasses import replace
from functools import cache
from types import NoneType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache  # so that it has an effect once
def make_interpreter_faster() -> None:
    """Let the interpreter compute once what it otherwise computes for every operation of a kernel.

    This depends on the interpreter's private functions, so a new version of Triton may require changes here.
    """
    _replace_functions_once()
    _call_functions_directly()
    _remember_types()
    _broadcast_only_other_shapes()
    _unwrap_only_constants()
    # The interpreter computes each sum and product of integers a second time, in 64 bits, for an assertion that it
    # makes only in a debug build.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _replace_functions_once() -> None:
    """Replace the functions of triton.language once for each kernel, not for each function that a kernel calls."""
    replace_all = interpreter._patch_lang
    # A function of a kernel refers to triton.language by one of these names or by both.
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scopes: list[Any] = []

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            scopes.clear()

    def replace_once(_: Any) -> Any:
        if not scopes:
            scopes.append(replace_all(both))
        return scopes[0]

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = replace_once


def _call_functions_directly() -> None:
    """Call a function of triton.language without the two functions around it that look at its arguments' names."""

    def replace_function(place: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
        direct, semantic = getattr(function, "__wrapped__", function), interpreter.interpreter_semantic

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return direct(*arguments, **named)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = replace_function


def _remember_types() -> None:
    """Keep what follows from the type of a tensor, and from the shape and the elements' type of a block.

    All blocks of the same size have the same object as their shape.
    """
    number_type, init_block, init_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    number_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[Any, ...], Any] = {}
    tensors: dict[str, tuple[Any, Any]] = {}

    def remembered_number_type(type: Any) -> Any:
        if type.name not in number_types:
            number_types[type.name] = number_type(type)
        return number_types[type.name]

    def init_remembered_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = (element_ty.name, *sizes)
        if key not in blocks:
            init_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def init_remembered_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[type.name]

    interpreter._get_np_dtype = remembered_number_type
    tl.block_type.__init__ = init_remembered_block
    tl.tensor.__init__ = init_remembered_tensor


def _broadcast_only_other_shapes() -> None:
    """Leave two operands as they are when both are blocks of the same shape, or none is a block."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        # Types without a shape are no blocks.
        one, other = vars(left.type).get("shape"), vars(right.type).get("shape")
        return (left, right) if one is other else broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_others


def _unwrap_only_constants() -> None:
    """Ask of the types that are no containers only once what they are."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = {NoneType, bool, float, int, slice, str, tl.tensor, tl.dtype, tl.slice}

    def unwrap_constant(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap_constant
