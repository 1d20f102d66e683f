"""Parts of the cache into one buffer and back, and their checksum."""

import random

import pytest
import torch

from .closeness import poisoned


def naive_checksum(values: torch.Tensor) -> int:
    data = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_any_part_of_the_cache_makes_the_round_trip(device: torch.device, dtype: torch.dtype, size: int) -> None:
    from baton_kernels.blocks import gather_kv, scatter_kv
    from baton_kernels.reference.blocks import gather_kv_reference, scatter_kv_reference

    shape = 3, 2, 9, size, 3, 16
    cache = torch.randn(shape, device=device).to(dtype)
    rng = random.Random(torch.initial_seed())
    for _ in range(5):
        table = torch.tensor(rng.sample(range(9), 5), device=device)
        first = rng.randrange(5 * size)
        count = rng.randint(1, 5 * size - first)
        layers, heads = slice(*sorted(rng.sample(range(4), 2))), slice(*sorted(rng.sample(range(4), 2)))
        parts = layers.stop - layers.start, heads.stop - heads.start
        expected = torch.stack(
            [
                cache[layers, :, table[position // size], position % size, heads]
                for position in range(first, first + count)
            ],
            dim=2,
        )
        for gather, scatter in ((gather_kv, scatter_kv), (gather_kv_reference, scatter_kv_reference)):
            packed = poisoned(parts[0], 2, count, parts[1], 16, like=cache)
            checksum = gather(cache, table, first, layers, heads, packed)
            assert torch.equal(packed, expected)
            assert int(checksum) == naive_checksum(packed)
            copy = torch.zeros_like(cache)
            assert int(scatter(copy, table, first, layers, heads, packed)) == int(checksum)
            again = poisoned(*packed.shape, like=cache)
            gather_kv_reference(copy, table, first, layers, heads, again)
            assert torch.equal(again, packed)
            # Nothing else was written.
            assert copy.abs().double().sum().item() == pytest.approx(packed.abs().double().sum().item())


def test_checksum_sees_a_flipped_bit_and_swapped_words(device: torch.device) -> None:
    from baton_kernels.blocks import checksum
    from baton_kernels.reference.blocks import checksum_reference

    words = torch.randint(-(2**31), 2**31, (64,), dtype=torch.int32, device=device)
    original = int(checksum_reference(words))
    assert int(checksum(words)) == original == naive_checksum(words)
    many = torch.randn(5, 1999, device=device)
    assert int(checksum(many)) == int(checksum_reference(many))
    for bit in range(31):
        damaged = words.clone()
        damaged[11] ^= 1 << bit
        assert int(checksum_reference(damaged)) != original
    swapped = words.clone()
    swapped[3], swapped[4] = words[4], words[3]
    assert int(checksum_reference(swapped)) != original
