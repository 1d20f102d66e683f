"""Parts of the cache are copied into one buffer and back, with their checksum."""

import random

import pytest
import torch


def naive_checksum(values: torch.Tensor) -> int:
    data = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % 2**32


# Planes as (heads, dim, dtype). A latent vector has no heads of its own. Scales have as many heads as their values and
# one element for each; a plane may have fewer heads than another.
LAYOUTS: dict[str, list[tuple[int, int, torch.dtype]]] = {
    "keys and values": [(3, 16, torch.float32)] * 2,
    "in 16 bits": [(3, 16, torch.bfloat16)] * 2,
    "latent": [(1, 72, torch.bfloat16)],
    "8 bits with scales": [(3, 8, torch.uint8), (3, 1, torch.float32), (1, 4, torch.bfloat16)],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_any_part_of_the_cache_makes_the_round_trip(device: torch.device, name: str, size: int) -> None:
    from baton_kernels.blocks import gather_kv, scatter_kv
    from baton_kernels.reference.blocks import gather_kv_reference, scatter_kv_reference

    planes = [
        (torch.rand(3, 9, size, heads, dim, device=device) * 200 + 1).to(dtype) for heads, dim, dtype in LAYOUTS[name]
    ]
    rng = random.Random(torch.initial_seed())
    most_heads = max(heads for heads, _, _ in LAYOUTS[name])
    for _ in range(5):
        table = torch.tensor(rng.sample(range(9), 5), device=device)
        first = rng.randrange(5 * size)
        tokens = slice(first, first + rng.randint(1, 5 * size - first))
        layers = slice(*sorted(rng.sample(range(4), 2)))
        heads = slice(*sorted(rng.sample(range(most_heads + 1), 2)))
        expected = b"".join(
            bytes(plane[layer, table[position // size], position % size, heads].view(torch.uint8).cpu().flatten())
            for layer in range(layers.start, layers.stop)
            for plane in planes
            for position in range(tokens.start, tokens.stop)
        )
        for gather, scatter in ((gather_kv, scatter_kv), (gather_kv_reference, scatter_kv_reference)):
            packed = torch.full((len(expected),), 0xA5, dtype=torch.uint8, device=device)
            checksum = gather(planes, table, tokens, layers, heads, packed)
            assert bytes(packed.cpu()) == expected
            assert int(checksum) == naive_checksum(packed)
            copies = [torch.zeros_like(plane) for plane in planes]
            assert int(scatter(copies, table, tokens, layers, heads, packed)) == int(checksum)
            again = torch.zeros_like(packed)
            gather_kv_reference(copies, table, tokens, layers, heads, again)
            assert torch.equal(again, packed)
            # No other byte was written: no element of the buffer is 0.
            written = sum(int((copy != 0).sum()) * copy.element_size() for copy in copies)
            assert written == len(expected)


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
