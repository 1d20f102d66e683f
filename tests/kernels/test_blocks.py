"""Blocks into one buffer and back, and their checksum."""

import torch

from .closeness import poisoned


def naive_checksum(values: torch.Tensor) -> int:
    data = values.cpu().numpy().tobytes()
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % 2**32


def test_round_trip(device: torch.device) -> None:
    from baton_kernels.blocks import (
        gather_blocks,
        gather_blocks_reference,
        scatter_blocks,
        scatter_blocks_reference,
    )

    cache = torch.randn(3, 2, 9, 4, 2, 16, device=device)
    blocks = torch.tensor([7, 0, 3], device=device)
    for gather, scatter in ((gather_blocks, scatter_blocks), (gather_blocks_reference, scatter_blocks_reference)):
        packed = poisoned(3, 2, 3, 4, 2, 16, like=cache)
        checksum = gather(cache, blocks, packed)
        assert torch.equal(packed, cache[:, :, blocks])
        assert int(checksum) == naive_checksum(packed)
        copy = torch.zeros_like(cache)
        assert int(scatter(copy, blocks, packed)) == int(checksum)
        assert torch.equal(copy[:, :, blocks], packed)
        rest = [block for block in range(9) if block not in blocks]
        assert not copy[:, :, rest].any()


def test_checksum_sees_a_flipped_bit_and_swapped_words(device: torch.device) -> None:
    from baton_kernels.blocks import checksum_reference

    words = torch.randint(-(2**31), 2**31, (64,), dtype=torch.int32, device=device)
    original = int(checksum_reference(words))
    for bit in range(31):
        damaged = words.clone()
        damaged[11] ^= 1 << bit
        assert int(checksum_reference(damaged)) != original
    swapped = words.clone()
    swapped[3], swapped[4] = words[4], words[3]
    assert int(checksum_reference(swapped)) != original
