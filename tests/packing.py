"""Weights in formats whose tools do not run here, packed code by code as the formats' documentation says."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Codes = NDArray[np.int64]
Tensors = dict[str, torch.Tensor]


def _words(codes: Codes, bits: int, places: list[int]) -> torch.Tensor:
    """Pack codes along the last axis; places: where in its word each code lies, counted from the lowest bits."""
    *others, count = codes.shape
    words = np.zeros((*others, count * bits // 32), dtype=np.uint32)
    for index in range(count):
        word, inside = divmod(index, 32 // bits)
        words[..., word] |= (codes[..., index] << (bits * places[inside])).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(weight: torch.Tensor, bits: int, group: int, version: int, groups: torch.Tensor | None = None) -> Tensors:
    """Return a weight [outputs, inputs] in GPTQ's layout, and the numbers that its codes stand for.

    version: of the layout. groups: the group of each input; None = inputs in their own order.
    """
    outputs, inputs = weight.shape
    rng = np.random.default_rng(int(weight.abs().sum() * 1000))
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    # The first version can store 0, by a borrow from the code beside it.
    zeros = rng.integers(0, 1 << bits, (inputs // group, outputs))
    scales = torch.from_numpy(rng.uniform(0.01, 0.04, (inputs // group, outputs)) / (1 << bits) * 16).half()
    g_idx = torch.arange(inputs, dtype=torch.int32) // group if groups is None else groups.int()
    in_order = list(range(32 // bits))
    stored = _words(zeros, bits, in_order)
    if version == 1:
        ones = sum(1 << bit for bit in range(0, 32, bits))
        stored = torch.from_numpy((stored.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    which = g_idx.long()
    numbers = (torch.from_numpy(codes) - torch.from_numpy(zeros)[which]).double() * scales.double()[which]
    return {
        "qweight": _words(codes.T, bits, in_order).t(),
        "qzeros": stored,
        "scales": scales,
        "g_idx": g_idx,
        "numbers": numbers.t().float(),
    }


def awq(weight: torch.Tensor, group: int) -> Tensors:
    """Return a weight in AWQ's layout GEMM. In a word the outputs 0, 2, 4, 6, 1, 3, 5, 7 follow each other."""
    outputs, inputs = weight.shape
    rng = np.random.default_rng(int(weight.abs().sum() * 1000))
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    scales = torch.from_numpy(rng.uniform(0.01, 0.04, (inputs // group, outputs))).half()
    places = [[0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8)]
    which = np.arange(inputs) // group
    numbers = torch.from_numpy(codes - zeros[which]).double() * scales.double()[torch.from_numpy(which)]
    return {
        "qweight": _words(codes, 4, places),
        "qzeros": _words(zeros, 4, places),
        "scales": scales,
        "numbers": numbers.t().float(),
    }


def fp8(weight: torch.Tensor, tile: tuple[int, int] | None, scale_name: str, exponents: bool = False) -> Tensors:
    """Return a weight in FP8, with a scale for each tile of outputs and inputs; None = for all. exponents: scales are
    stored as exponents of two alone."""
    rows, columns = tile or weight.shape
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = tiles.abs().amax(dim=(1, 3)) / 448
    if exponents:
        scales = torch.exp2(scales.log2().ceil())
    of_each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / of_each).to(torch.float8_e4m3fn)
    numbers = (codes.double() * of_each.double()).float()
    scales = scales.to(torch.float8_e8m0fnu) if exponents else scales
    return {"weight": codes, scale_name: scales if tile else scales.reshape(()), "numbers": numbers}


def packed_int4(weight: torch.Tensor, group: int, groups: torch.Tensor) -> Tensors:
    """Return a weight in 4 bits as compressed-tensors packs it, symmetric, with the group of each input."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
    scales = torch.rand(len(weight), weight.shape[1] // group) / 50
    return {
        "weight_packed": pack_to_int32(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": groups.int(),
        "numbers": codes * scales[:, groups.long()],
    }


def mxfp4(weight: torch.Tensor) -> Tensors:
    """Return a weight [..., outputs, inputs] as gpt-oss stores it."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    *shape, inputs = weight.shape
    rng = np.random.default_rng(int(weight.abs().sum() * 1000))
    codes = rng.integers(0, 16, (*shape, inputs // 32, 32))
    exponents = rng.integers(120, 126, (*shape, inputs // 32))
    signed: Any = np.array(values + [-value for value in values])
    numbers = signed[codes] * 2.0 ** (exponents[..., None] - 127.0)
    return {
        "blocks": torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)),
        "scales": torch.from_numpy(exponents.astype(np.uint8)),
        "numbers": torch.from_numpy(numbers).float().reshape(weight.shape),
    }


def nvfp4(weight: torch.Tensor, factor: float = 2.0**-9) -> Tensors:
    """Return a weight [outputs, inputs] in NVFP4 as Model Optimizer stores it. factor: of all scales."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    outputs, inputs = weight.shape
    rng = np.random.default_rng(int(weight.abs().sum() * 1000))
    codes = rng.integers(0, 16, (outputs, inputs // 16, 16))
    scales = torch.from_numpy(rng.uniform(0, 8, (outputs, inputs // 16))).to(torch.float8_e4m3fn)
    signed: Any = np.array(values + [-value for value in values])
    numbers = torch.from_numpy(signed[codes]).float() * scales.float()[..., None] * factor
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return {
        "weight": torch.from_numpy(pairs.astype(np.uint8)).reshape(outputs, inputs // 2),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(factor),
        "numbers": numbers.reshape(weight.shape),
    }
