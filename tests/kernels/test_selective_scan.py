"""Mamba 1 over paged states, against each whole sequence in float64."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from baton_kernels.reference.selective_scan import (
    ChannelShape,
    ScanInputs,
    convolve_reference,
    selective_scan_reference,
)
from baton_kernels.selective_scan import convolve, selective_scan

from .test_short_conv import slots_of

BLOCK_SIZE = 4
OPS = {"reference": (convolve_reference, selective_scan_reference), "kernel": (convolve, selective_scan)}
SHAPES = {
    "two-groups": ChannelShape(2, 12, 5, 4),
    "several-programs": ChannelShape(1, 70, 16, 3),
    "shortest-filter": ChannelShape(4, 8, 3, 2),
}
LENGTHS = (11, 1, 14)


def in_chunks(
    wholes: list[torch.Tensor],
    tables: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Return what steps compute for the tokens of each sequence. Each step has a chunk of every sequence that is left,
    and two tokens of none. compute: takes rows and slots."""
    results: list[list[torch.Tensor]] = [[], [], []]
    for ends in ((5, 1, 1), (6, 1, 2), (7, 1, 4), (11, 1, 14)):
        chunks = [(number, sum(map(len, results[number])), end) for number, end in enumerate(ends)]
        chunks = [chunk for chunk in chunks if chunk[1] < chunk[2]]
        rows = torch.cat([wholes[number][first:end] for number, first, end in chunks])
        slots = torch.cat([slots_of(tables[number], first, end, 2) for number, first, end in chunks], dim=1)
        rows = torch.cat([rows, torch.randn_like(wholes[0][:2])])
        out = compute(rows, functional.pad(slots, (0, 2), value=-1).to(rows.device))
        for number, first, end in chunks:
            results[number].append(out[: end - first])
            out = out[end - first :]
    return [torch.cat(result) for result in results]


def plane_for(count: int, shape: ChannelShape, device: torch.device) -> torch.Tensor:
    """Return 20 blocks with some more room than a group's numbers take, and nothing in them."""
    return torch.full((20, BLOCK_SIZE, shape.groups, -(-count // BLOCK_SIZE) + 1), float("nan"), device=device)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("silu", [False, True], ids=["no silu", "silu"])
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_give_the_convolution_of_each_whole_sequence(
    op: str, biased: bool, silu: bool, name: str, device: torch.device
) -> None:
    shape, tables = SHAPES[name], torch.randperm(18)[:12].view(3, 4)
    filters = torch.randn(shape.channels, shape.length, device=device)
    bias = torch.randn(shape.channels, device=device) if biased else None
    # As in a layer, the inputs are a part of longer rows.
    wholes = [torch.randn(count, shape.channels + 3, device=device) for count in LENGTHS]
    expected = []
    for whole in wholes:
        padded = functional.pad(whole[:, : shape.channels].double().T, (shape.length - 1, 0))
        added = None if bias is None else bias.double()
        wide = functional.conv1d(padded[None], filters.double()[:, None], added, groups=shape.channels)
        expected.append(functional.silu(wide[0].T) if silu else wide[0].T)
    plane = plane_for(shape.plane_elements[1], shape, device)

    def compute(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return OPS[op][0](rows[:, : shape.channels], filters, bias, slots, plane, shape, silu)

    for result, correct in zip(in_chunks(wholes, tables, compute), expected, strict=True):
        torch.testing.assert_close(result.double(), correct, rtol=1e-4, atol=1e-5)
    # A sequence with the same beginning goes on from a complete block.
    table = torch.cat([tables[2, :2], torch.tensor([19, 18])])
    out = compute(wholes[2][8:], slots_of(table, 8, 14, 2).to(device))
    torch.testing.assert_close(out.double(), expected[2][8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_give_the_scan_of_each_whole_sequence(op: str, name: str, device: torch.device) -> None:
    shape, tables = SHAPES[name], torch.randperm(18)[:12].view(3, 4)
    log_decay = torch.randn(shape.channels, shape.state, device=device)
    # The steps of some channels are as short as those of published models, and those of others are long.
    rate_bias = torch.linspace(-12, 25, shape.channels, device=device)
    skip = torch.randn(shape.channels, device=device)
    sizes = [shape.channels] * 3 + [shape.state] * 2
    wholes = [torch.randn(count, sum(sizes), device=device) for count in LENGTHS]
    expected = []
    for whole in wholes:
        x, rates, gates, b, c = whole.double().split(sizes, dim=1)
        step, speed = functional.softplus(rates + rate_bias.double()), log_decay.double().exp()
        state, rows = torch.zeros_like(speed), []
        for token in range(len(whole)):
            state = torch.exp(-speed * step[token, :, None]) * state + torch.outer(step[token] * x[token], b[token])
            rows.append((state @ c[token] + skip.double() * x[token]) * functional.silu(gates[token]))
        expected.append(torch.stack(rows))
    plane = plane_for(shape.plane_elements[0], shape, device)

    def compute(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        given = ScanInputs(*rows.split(sizes, dim=1), log_decay, rate_bias, skip)
        return OPS[op][1](given, slots, plane, shape)

    for result, correct in zip(in_chunks(wholes, tables, compute), expected, strict=True):
        torch.testing.assert_close(result.double(), correct, rtol=1e-4, atol=1e-4)
    table = torch.cat([tables[2, :2], torch.tensor([19, 18])])
    out = compute(wholes[2][8:], slots_of(table, 8, 14, 2).to(device))
    torch.testing.assert_close(out.double(), expected[2][8:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_short_steps_are_precise(op: str, device: torch.device) -> None:
    """What a first token leaves is its step times numbers that are 1 here, and all that its result has."""
    shape = ChannelShape(1, 8, 1, 2)
    ones, rates = torch.ones(1, 8, device=device), torch.linspace(-30, -3, 8, device=device)
    zeros = torch.zeros(8, device=device)
    given = ScanInputs(ones, rates[None], 50 * ones, ones[:, :1], ones[:, :1], zeros[:, None], zeros, zeros)
    slots = torch.tensor([[0], [-1]], device=device)
    out = OPS[op][1](given, slots, plane_for(8, shape, device), shape)
    torch.testing.assert_close(out[0].double() / 50, functional.softplus(rates.double()), rtol=1e-5, atol=0)
