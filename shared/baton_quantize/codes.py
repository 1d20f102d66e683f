"""Numbers as codes of 8 or 4 bits, in the layout of compressed-tensors."""

import torch

Tensors = dict[str, torch.Tensor]

_E4M3_MOST = 448.0
# Fractions of a group's largest number that are tried as its range, beside the whole range of plain rounding.
_RANGES = [1.0 - step / 40 for step in range(1, 21)]


def round_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return positive numbers in the given dtype, none of them smaller than before, so that no code is clipped."""
    rounded = scales.to(dtype)
    if dtype == torch.float32:
        return rounded
    # The bits of positive floats are in the order of the floats.
    following = (rounded.view(torch.int16) + 1).view(dtype)
    return torch.where(rounded.float() < scales, following, rounded)


def eight_bit(weight: torch.Tensor, kind: torch.dtype, stored: torch.dtype) -> Tensors:
    """Return the nearest codes of a weight with a scale for each output.

    weight: [outputs, inputs] float32. kind: float8_e4m3fn or int8. stored: the dtype of scales. Returns `weight`
    [outputs, inputs] and `weight_scale` [outputs, 1].
    """
    most = _E4M3_MOST if kind == torch.float8_e4m3fn else 127.0
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = round_up(torch.where(largest == 0, 1.0, largest / most), stored)
    codes = (weight / scales.float()).clamp_(-most, most)
    if kind == torch.int8:
        codes = codes.round_()
    return {"weight": codes.to(kind), "weight_scale": scales}


def four_bit_scales(
    weight: torch.Tensor, group: int, stored: torch.dtype, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a scale for each group of inputs of each output, [outputs, groups] in the dtype `stored`.

    weight: [outputs, inputs] float32. importance: [inputs], weights of squared errors. Without them, a scale covers the
    largest number of its group, with the codes from -7.5 to 7.5, as compressed-tensors does. With them, smaller ranges
    are tried, too, and the one with the least error is taken.
    """
    groups = weight.view(len(weight), -1, group)
    largest = groups.abs().amax(dim=2) / 7.5
    plain = torch.where(largest == 0, 1.0, largest).to(stored)
    plain = torch.where(plain == 0, torch.finfo(stored).tiny, plain)
    if importance is None:
        return plain
    weights = importance.view(1, -1, group)
    best, least = plain, _group_errors(groups, plain, weights)
    for fraction in _RANGES:
        tried = (plain.float() * fraction).to(stored)
        errors = _group_errors(groups, tried, weights)
        better = (errors < least) & (tried > 0)
        best, least = torch.where(better, tried, best), torch.where(better, errors, least)
    return best


def _group_errors(groups: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    numbers = scales.float()[..., None]
    codes = (groups / numbers).round_().clamp_(-8, 7)
    errors: torch.Tensor = codes.mul_(numbers).sub_(groups).square_().mul_(importance).sum(dim=2)
    return errors


def four_bit_codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes, [outputs, inputs] int8 from -8 to 7. scales: [outputs, groups]."""
    codes = (weight.view(*scales.shape, -1) / scales.float()[..., None]).round_().clamp_(-8, 7)
    return codes.flatten(1).to(torch.int8)


def four_bit_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what codes stand for, [outputs, inputs] float32."""
    numbers = codes.float().view(*scales.shape, -1) * scales.float()[..., None]
    return numbers.flatten(1)


def pack_four_bit(codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """Return the tensors of the layout pack-quantized: eight codes in a word of 32 bits, the first in its lowest bits,
    as offsets from -8. codes: [outputs, inputs] int8, inputs a multiple of 8."""
    offsets = (codes + 8).view(torch.uint8)
    pairs = offsets[:, ::2] | (offsets[:, 1::2] << 4)
    return {
        "weight_packed": pairs.contiguous().view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
