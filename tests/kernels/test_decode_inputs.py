"""The unpacking of a decode step's inputs, against the reference."""

import pytest
import torch

from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.reference.decode_inputs import BLOCK, HEAT, POSITION, ROW, TOKEN, unpack_reference


@pytest.mark.parametrize("count", [1, 7, 200])
def test_unpack(count: int, device: torch.device) -> None:
    block_size, rows, width = 16, count + 3, 9
    inputs = DecodeInputs(count, device)
    packed = torch.randint(-(2**62), 2**62, inputs.packed.shape)
    packed[ROW] = torch.randperm(rows)[:count]
    packed[POSITION] = torch.randint(0, width * block_size, (count,))
    packed[BLOCK] = torch.randint(-1, 50, (count,)).clamp(min=-1)
    packed[TOKEN] = torch.where(torch.rand(count) < 0.5, -1, torch.randint(0, 1000, (count,)))
    packed[HEAT:] = torch.rand(3, count).view(torch.int32)
    last_tokens = torch.randint(-1, 4, (rows,))
    tables = torch.randint(0, 50, (rows, width), dtype=torch.int32)
    expected_tables = tables.clone()
    expected = unpack_reference(packed, last_tokens, expected_tables, block_size)

    inputs.packed.copy_(packed)
    tables = tables.to(device)
    inputs.unpack(last_tokens.to(device), tables, block_size)
    assert torch.equal(tables.cpu(), expected_tables)
    for name, value in expected.items():
        assert torch.equal(getattr(inputs, name).cpu(), value), name
