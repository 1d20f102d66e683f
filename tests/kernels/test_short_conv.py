"""Short convolutions over paged inputs, against torch's convolution of each whole sequence."""

import pytest
import torch
from torch.nn import functional

from baton_kernels.reference.short_conv import short_conv_reference
from baton_kernels.short_conv import short_conv

BLOCK_SIZE = 4


def slots_of(table: torch.Tensor, first: int, end: int, length: int, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """Return the slots of the tokens [first, end) of a sequence and of those before each, [length, tokens]."""
    positions = torch.arange(first, end) - torch.arange(length)[:, None]
    slots = table[positions.clamp(min=0) // block_size] * block_size + positions % block_size
    return torch.where(positions >= 0, slots, -1)


@pytest.mark.parametrize("op", [short_conv_reference, short_conv], ids=["reference", "kernel"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("length", "heads", "half"), [(3, 2, 6), (6, 1, 20), (1, 3, 2)])
def test_chunks_of_sequences_give_the_convolution_of_each_whole_one(
    op: type, biased: bool, length: int, heads: int, half: int, device: torch.device
) -> None:
    channels, lengths = 2 * heads * half, (11, 1, 14)
    weight = torch.randn(channels, length, device=device)
    bias = torch.randn(channels, device=device) if biased else None
    wholes = [torch.randn(count, 3 * channels, device=device) for count in lengths]
    expected = []
    for whole in wholes:
        input_gate, gate, x = whole.double().chunk(3, dim=1)
        padded = functional.pad((input_gate * x).T, (length - 1, 0))
        wide = functional.conv1d(
            padded[None], weight.double()[:, None], None if bias is None else bias.double(), groups=channels
        )
        expected.append(gate * wide[0].T)
    tables = torch.randperm(20)[:12].view(3, 4)
    # Heads lie further apart than they are long, as in a cache whose other layers have longer ones.
    keys, values = (
        torch.full((20, BLOCK_SIZE, heads, half + 3), float("nan"), device=device)[..., :half] for _ in "kv"
    )
    results: list[list[torch.Tensor]] = [[], [], []]
    # Each step has a chunk of every sequence that is left, and two tokens of none.
    for ends in ((5, 1, 1), (6, 1, 2), (11, 1, 14)):
        chunks = [(number, sum(map(len, results[number])), end) for number, end in enumerate(ends)]
        chunks = [chunk for chunk in chunks if chunk[1] < chunk[2]]
        rows = torch.cat([wholes[number][first:end] for number, first, end in chunks])
        slots = torch.cat([slots_of(tables[number], first, end, length) for number, first, end in chunks], dim=1)
        rows = torch.cat([rows, torch.randn(2, 3 * channels, device=device)])
        slots = functional.pad(slots, (0, 2), value=-1).to(device)
        out = op(rows, weight, bias, slots, keys, values)
        for number, first, end in chunks:
            results[number].append(out[: end - first])
            out = out[end - first :]
    for result, correct in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.cat(result).double(), correct, rtol=1e-4, atol=1e-5)
    if length > 1:
        written = torch.stack([keys, values]).isfinite().all(dim=(0, 3, 4)).sum()
        assert written == sum(lengths)
