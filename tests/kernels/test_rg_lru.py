"""The real-gated linear recurrent unit over paged states, against each whole sequence in float64."""

import pytest
import torch

from baton_kernels.reference.rg_lru import UnitInputs, rg_lru_reference
from baton_kernels.reference.selective_scan import ChannelShape
from baton_kernels.rg_lru import rg_lru

from .test_selective_scan import LENGTHS, in_chunks, plane_for
from .test_short_conv import slots_of

OPS = {"reference": rg_lru_reference, "kernel": rg_lru}
SHAPES = {"two-groups": ChannelShape(2, 12, 1, 4), "several-programs": ChannelShape(1, 150, 1, 3)}


def unit_inputs(rows: torch.Tensor, *others: torch.Tensor) -> UnitInputs:
    """rows: inputs and both gates side by side. others: the biases and the speed."""
    x, input_gates, decay_gates = (each.contiguous() for each in rows.chunk(3, dim=1))
    return UnitInputs(x, input_gates, decay_gates, *others)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_give_the_states_of_each_whole_sequence(op: str, name: str, device: torch.device) -> None:
    shape, tables = SHAPES[name], torch.randperm(18)[:12].view(3, 4)
    # The states of some channels hardly decay, as in published models, and those of others decay at once.
    speed = torch.logspace(-6, 2, shape.channels, device=device)
    biases = torch.randn(2, shape.channels, device=device)
    wholes = [torch.randn(count, 3 * shape.channels, device=device) for count in LENGTHS]
    expected = []
    for whole in wholes:
        x, input_gates, decay_gates = whole.double().chunk(3, dim=1)
        log_decay = -speed.double() * torch.sigmoid(decay_gates + biases[1].double())
        added = torch.sigmoid(input_gates + biases[0].double()) * x
        rows = [added[0]]
        for token in range(1, len(whole)):
            factor = torch.sqrt(-torch.expm1(2 * log_decay[token]))
            rows.append(log_decay[token].exp() * rows[-1] + factor * added[token])
        expected.append(torch.stack(rows))
    plane = plane_for(shape.plane_elements[0], shape, device)

    def compute(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return OPS[op](unit_inputs(rows, *biases, speed), slots, plane, shape)

    for result, correct in zip(in_chunks(wholes, tables, compute), expected, strict=True):
        torch.testing.assert_close(result.double(), correct, rtol=1e-4, atol=1e-5)
    # A sequence with the same beginning goes on from a complete block.
    table = torch.cat([tables[2, :2], torch.tensor([19, 18])])
    out = compute(wholes[2][8:], slots_of(table, 8, 14, 2).to(device))
    torch.testing.assert_close(out.double(), expected[2][8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_inputs_beside_states_that_hardly_decay_are_precise(op: str, device: torch.device) -> None:
    """What a second token adds to a state of 0 is the root alone, since its gated input is 1."""
    shape, speed = ChannelShape(1, 40, 1, 2), torch.logspace(-12, 2, 40, device=device)
    rows = torch.tensor([0.0, 1.0], device=device)[:, None].repeat(1, 40)
    open_gates, biases = torch.full((2, 80), 50.0, device=device), torch.zeros(2, 40, device=device)
    given = unit_inputs(torch.cat([rows, open_gates], dim=1), *biases, speed)
    slots = torch.tensor([[0, 1], [-1, 0]], device=device)
    out = OPS[op](given, slots, plane_for(40, shape, device), shape)
    expected = torch.sqrt(-torch.expm1(-2 * speed.double()))
    torch.testing.assert_close(out[1].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_states_keep_what_16_bits_would_lose(op: str, device: torch.device) -> None:
    """Each token adds a thousandth to a state of 1, in several steps. In bfloat16 these sums would be 1 again."""
    shape, tokens = ChannelShape(1, 4, 1, 2), 40
    biases, speed = torch.zeros(2, 4, device=device), torch.full((4,), 5e-7, device=device)
    rows = torch.ones(tokens, 12, device=device)
    rows[:, 4:] = 50.0
    plane, table = plane_for(4, shape, device), torch.arange(10)
    for first, end in ((0, 30), (30, 31), (31, tokens)):
        given = unit_inputs(rows[first:end].bfloat16(), *biases, speed)
        out = OPS[op](given, slots_of(table, first, end, 2).to(device), plane, shape)
    assert out.dtype == torch.bfloat16
    # The interpreter rounds results towards 0.
    torch.testing.assert_close(out[-1].float(), torch.full_like(speed, 1 + (tokens - 1) / 1000), rtol=8e-3, atol=0)
