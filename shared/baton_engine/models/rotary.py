"""Rotary position embeddings (Su et al., "RoFormer", 2021) and their context extensions."""

import math

import torch

from baton_engine.model_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return [head_dim / 2] float32: radians per position of each rotated pair.

    linear: position interpolation (Chen et al., 2023). llama3: long wavelengths are divided by the factor, short ones
    kept, those between interpolated (Llama 3.1). yarn: "NTK-by-parts" (Peng et al., 2023).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = rope.theta**exponents
    plain = 1.0 / periods
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        wavelengths = 2 * math.pi / plain
        kept = rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor
        kept = (kept / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * plain / rope.factor + kept * plain
    if rope.type == "yarn":
        low, high = (_yarn_dimension(rope, head_dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        # A range without width would divide by zero.
        high = high + 0.001 if low == high else high
        kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * (1.0 / (rope.factor * periods)) + kept * plain
    return plain


def _yarn_dimension(rope: Rope, head_dim: int, rotations: float) -> float:
    """Return the dimension that turns so many times over the original context."""
    period = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(period) / (2 * math.log(rope.theta))


def rotary_tables(rope: Rope, head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position, [max_positions, head_dim / 2] float32 each."""
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inverse_frequencies(rope, head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
