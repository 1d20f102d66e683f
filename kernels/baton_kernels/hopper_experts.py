"""MoE layers on Hopper, with weights of any format that hopper_products.py multiplies.

TMA can only fetch consecutive rows, so the rows of tokens are gathered in the order of the groups before the first
product. The results of the first product keep this order.
"""

import torch

from .hopper_codes import has_hopper_kernel, hopper_codes
from .hopper_numbers import fits_hopper, fits_hopper_scaled, hopper_numbers, hopper_scaled
from .hopper_products import Pairs
from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig
from .pair_groups import PairGroups
from .pair_rows import gather_rows, quantize_pairs
from .reference.activation import is_gated
from .reference.experts import ExpertWeights
from .reference.grouped_linear import GroupedWeight
from .reference.quantized_experts import ExpertCodes, QuantizedExperts, Rounding
from .reference.scaled_linear import ScaledWeight
from .unmeasured_hopper import CODES, NUMBERS, Operands, hopper_experts_candidates, scaled_numbers

Experts = ExpertWeights | QuantizedExperts


def fits_hopper_experts(held: Experts, dtype: torch.dtype) -> bool:
    """Whether hopper_experts can compute a layer of experts. dtype: of the hidden states."""
    weights = held.gate_up, held.down
    if isinstance(held.gate_up, GroupedWeight):
        return has_hopper_kernel(held.gate_up, dtype)
    if isinstance(held.gate_up, ScaledWeight):
        has_no_zeros = isinstance(held, QuantizedExperts) and held.rows is not None and held.rows.symmetric
        return has_no_zeros and all(isinstance(each, ScaledWeight) and fits_hopper_scaled(each) for each in weights)
    return all(isinstance(each, torch.Tensor) and fits_hopper(each) for each in weights)


def candidates(held: Experts, tokens: int, layer: ExpertLayer) -> list[ExpertsConfig]:
    """Return the configurations to measure where fits_hopper_experts, those that are fastest most often first."""
    return hopper_experts_candidates(_operands(held), tokens, layer)


def hopper_experts(
    x: torch.Tensor, held: Experts, groups: PairGroups, results: torch.Tensor, count: int, config: ExpertsConfig
) -> None:
    """Compute the results of pairs, [pairs, hidden], where fits_hopper_experts. count: experts of a token."""
    gate_up, down = held.gate_up, held.down
    outputs = (gate_up if isinstance(gate_up, torch.Tensor) else gate_up.codes).shape[1]
    inner = x.new_empty(len(groups.order), outputs // 2 if is_gated(held.gate) else outputs)
    rows = [Rounding(None, None)] * 2 if isinstance(held, ExpertWeights) else [held.rounding(at) for at in (0, 1)]
    tiles = [
        LinearConfig(config.block_rows, *each[:2], 1, *each[2:], hopper=True) for each in (config.gate_up, config.down)
    ]
    _product(x, gate_up, held.gate_up_bias, tiles[0], inner, Pairs(groups, gate=held.gate), rows[0], count)
    _product(inner, down, held.down_bias, tiles[1], results, Pairs(groups, ordered=True), rows[1], 0)


def _product(
    x: torch.Tensor,
    weight: ExpertCodes,
    bias: torch.Tensor | None,
    config: LinearConfig,
    out: torch.Tensor,
    pairs: Pairs,
    rows: Rounding,
    count: int,
) -> None:
    """Multiply rows with the weights of the experts of their pairs. count: experts of a token, if the rows of x are
    tokens; 0 = they are in the order of the groups."""
    gated = is_gated(pairs.gate)
    if isinstance(weight, ScaledWeight):
        assert rows.form is not None
        quantized = quantize_pairs(x, pairs.groups, rows.form, count, rows.scales)
        hopper_scaled(quantized, weight, bias, gated, config, out, pairs)
        return
    if count:
        x = gather_rows(x, pairs.groups, count)
    if isinstance(weight, GroupedWeight):
        hopper_codes(x, weight, bias, gated, config, out, pairs)
    else:
        hopper_numbers(x, weight, bias, gated, config, out, pairs)


def _operands(held: Experts) -> Operands:
    weight = held.gate_up
    if isinstance(weight, GroupedWeight):
        return CODES
    if isinstance(weight, ScaledWeight):
        return scaled_numbers(weight)
    return NUMBERS
