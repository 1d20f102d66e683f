"""Rotation, head norms and the write into the paged cache."""

import pytest
import torch

from .closeness import poisoned, relative_error

HEADS, KV_HEADS, TOKENS = 6, 2, 7


def naive(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + half) of one head, element by element, in float64."""
    half = len(head) // 2
    out = torch.empty(len(head), dtype=torch.float64)
    for i in range(half):
        a, b, c, s = float(head[i]), float(head[half + i]), float(cos[i]), float(sin[i])
        out[i], out[half + i] = a * c - b * s, b * c + a * s
    return out


@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (80, 80), (48, 32), (24, 80)])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("apart", [0, 8])
def test_matches_float64(
    device: torch.device, dim: int, value_dim: int, with_norms: bool, rotates: bool, apart: int
) -> None:
    from baton_kernels.reference.rope import rope_and_cache_reference
    from baton_kernels.rope import rope_and_cache

    keyed = (HEADS + KV_HEADS) * dim
    qkv = torch.randn(TOKENS, keyed + KV_HEADS * value_dim, device=device)
    angles = torch.rand(50, dim // 2, device=device) * 6
    positions = torch.randint(0, 50, (TOKENS,), device=device)
    slots = torch.randperm(40, device=device)[:TOKENS]
    slots[3] = -1
    norms = (torch.randn(dim, device=device), torch.randn(dim, device=device)) if with_norms else None
    for function in (rope_and_cache, rope_and_cache_reference):
        # Heads of the cache may lie apart.
        keys, values = (poisoned(10, 4, KV_HEADS, size + apart, like=qkv)[..., :size] for size in (dim, value_dim))
        rotary = (angles.cos(), angles.sin()) if rotates else None
        q = function(qkv, rotary, positions, slots, keys, values, HEADS, norms, 1e-6)
        written = torch.zeros(40, dtype=torch.bool)
        for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
            heads = qkv[token, :keyed].view(-1, dim).double().cpu()
            cos, sin = angles[position].cos(), angles[position].sin()
            for head in range(HEADS + KV_HEADS):
                x = heads[head]
                if norms is not None:
                    x = x / (x.square().mean() + 1e-6).sqrt() * norms[head >= HEADS].double().cpu()
                turned = naive(x, cos, sin) if rotates else x
                if head < HEADS:
                    assert relative_error(q[token, head].cpu(), turned) < 1e-5
                elif slot >= 0:
                    assert relative_error(keys.flatten(0, 1)[slot, head - HEADS].cpu(), turned) < 1e-5
            if slot >= 0:
                written[slot] = True
                expected = qkv[token, keyed:].view(KV_HEADS, value_dim).double().cpu()
                assert torch.equal(values.flatten(0, 1)[slot].double().cpu(), expected)
        for cache in (keys, values):
            assert torch.equal(cache.flatten(0, 1).isnan().any(-1).any(-1).cpu(), ~written), "only these slots"


def test_queries_alone(device: torch.device) -> None:
    from baton_kernels.reference.rope import rope_and_cache_reference
    from baton_kernels.rope import rope_and_cache

    dim, qkv = 32, torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * 32, device=device)
    angles, positions = torch.rand(50, dim // 2, device=device), torch.randint(0, 50, (TOKENS,), device=device)
    rotary, slots = (angles.cos(), angles.sin()), torch.arange(TOKENS, device=device)
    weight = torch.randn(dim, device=device)
    for function in (rope_and_cache, rope_and_cache_reference):
        keys, values = (poisoned(10, 4, KV_HEADS, dim, like=qkv) for _ in range(2))
        queries = qkv[:, : HEADS * dim].contiguous()
        none = (keys[:, :, :0], values[:, :, :0])
        alone = function(queries, rotary, positions, slots, *none, HEADS, (weight, weight), 1e-6)
        assert keys.isnan().all()
        assert values.isnan().all()
        together = function(qkv, rotary, positions, slots, keys, values, HEADS, (weight, weight), 1e-6)
        assert torch.equal(alone, together)
