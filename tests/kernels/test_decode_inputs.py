"""The inputs of a decode step, looked up by row, against the reference."""

import pytest
import torch

from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.reference.decode_inputs import (
    BLOCKS,
    FIELDS,
    LAST_TOKEN,
    POSITION,
    ROW,
    TEMPERATURE,
    unpack_reference,
)


@pytest.mark.parametrize(("groups", "recent"), [(1, 1), (3, 1), (2, 3), (1, 20)])
@pytest.mark.parametrize("count", [1, 7, 200])
def test_unpack(count: int, groups: int, recent: int, device: torch.device) -> None:
    block_size, rows, width = 16, count + 3, 9
    inputs = DecodeInputs(count, device, groups, recent)
    packed = torch.zeros(inputs.packed.shape, dtype=torch.int64)
    # Some of the rows, and the last one as padding.
    packed[ROW] = torch.randperm(rows - 1)[:count]
    packed[ROW, count // 2 :] = rows - 1
    packed[POSITION] = torch.randint(0, width * block_size, (count,))
    packed[BLOCKS:] = torch.randint(0, 50, (groups, count))
    columns = torch.randint(-(2**62), 2**62, (FIELDS, rows))
    columns[LAST_TOKEN] = torch.randint(-1, 4, (rows,))
    columns[TEMPERATURE:] = torch.rand(3, rows).view(torch.int32)
    tables = torch.randint(0, 50, (rows, groups, width), dtype=torch.int32)
    on_device, unchanged = tables.to(device, copy=True), tables.clone()
    expected = unpack_reference(packed, columns, tables, block_size, recent)
    assert not torch.equal(tables, unchanged) or count == 1
    assert (expected["slots"][:groups] < 0).sum() == groups * (count - count // 2)

    inputs.packed.copy_(packed)
    inputs.unpack(columns.to(device), on_device, block_size)
    for name, value in expected.items():
        assert torch.equal(getattr(inputs, name).cpu(), value), name
    assert torch.equal(on_device.cpu(), tables)
