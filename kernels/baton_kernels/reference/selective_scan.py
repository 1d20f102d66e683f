"""Mamba 1 over paged states (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023).

Each channel has a state, a vector. A token lets it decay by a factor for each element, adds the channel's input times a
vector that all channels share, B, and reads it with another such vector, C. How fast the state decays and how much is
added depends on the length of the channel's step for that token. The inputs of the channels are the results of a short
convolution over the last tokens. B, C and the steps are projections of these results, so the convolution and the scan
are two operations.

In the cache a layer has, in place of keys, the states, and in place of values, the last inputs of the convolution.
reference/recurrence.py describes how states move from block to block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from .state_blocks import places_before, planes_for, read_numbers, recent_places, rows_for, visits, write_numbers


class ChannelShape(NamedTuple):
    """The channels of a layer, each with a state of its own.

    groups: equal parts into which the channels are divided, as many as the cache has key-value heads. state: elements
    of a channel's state. length: elements of the convolution's filter, which are tokens.
    """

    groups: int
    channels: int
    state: int
    length: int

    def part(self, ranks: int) -> "ChannelShape":
        """Return the shape of what each of so many ranks has."""
        return self._replace(groups=self.groups // ranks, channels=self.channels // ranks)

    @property
    def recent(self) -> int:
        """As recent_places returns."""
        return recent_places(self.length)

    @property
    def plane_elements(self) -> tuple[int, int]:
        """The float32 numbers of a group in the plane of keys and in that of values: states, [channels of the group,
        state], and inputs, [recent, channels of the group]."""
        channels = self.channels // self.groups
        return channels * self.state, self.recent * channels

    def rows(self, head_bytes: Sequence[int]) -> int:
        """As rows_for returns."""
        return rows_for(self.plane_elements, head_bytes)

    def planes(self, cache: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As planes_for returns."""
        return planes_for(self.plane_elements, cache, self.groups)


class ScanInputs(NamedTuple):
    """What a layer gives the channels of a step's tokens.

    inputs, rates, gates: [T, channels]. added, read: [T, state], B and C. A token's step has the length softplus(rate +
    rate_bias), and a state decays by exp(-exp(log_decay) * step). Results are multiplied by silu(gate). log_decay:
    [channels, state] float32. rate_bias, skip: [channels] float32; skip is the factor of the input in the result.
    log_decay is contiguous, and so is each row of the others.
    """

    inputs: torch.Tensor
    rates: torch.Tensor
    gates: torch.Tensor
    added: torch.Tensor
    read: torch.Tensor
    log_decay: torch.Tensor
    rate_bias: torch.Tensor
    skip: torch.Tensor


def convolve_reference(
    inputs: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor, values: torch.Tensor,
    shape: ChannelShape, silu: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return silu(convolution), or the convolution itself, [T, channels], and write the last inputs to the cache.

    inputs: [T, channels], each row contiguous. filters: [channels, length], contiguous, the last element for the token
    itself. bias: [channels]. slots: as in recurrence_reference. values: [blocks, block_size, groups, head_dim], written
    in place.
    """
    plane, size = values.view(torch.float32), values.shape[1]
    rows, weights, count = inputs.float(), filters.T.float(), shape.plane_elements[1]
    out, recent = torch.empty_like(inputs), torch.empty(0)
    for token, (slot, before, begins, keeps) in enumerate(visits(slots, size)):
        if begins and before < 0:
            recent = rows.new_zeros(shape.length - 1, shape.channels)
        elif begins:
            kept = read_numbers(plane[before // size], count).unflatten(1, (shape.recent, -1))
            recent = kept.transpose(0, 1).flatten(1)[places_before(before % size, shape.length)]
        window = torch.cat([recent, rows[token : token + 1]])
        recent = window[1:]
        wide = (window * weights).sum(0)
        wide = wide if bias is None else wide + bias.float()
        out[token] = functional.silu(wide) if silu else wide
        if keeps:
            placed = rows.new_zeros(shape.recent, shape.channels)
            placed[places_before(slot % size, shape.length)] = recent
            write_numbers(plane[slot // size], placed.unflatten(1, (shape.groups, -1)).transpose(0, 1).flatten(1))
    return out


def selective_scan_reference(
    given: ScanInputs, slots: torch.Tensor, keys: torch.Tensor, shape: ChannelShape
) -> torch.Tensor:
    """Return what the channels read from their states, [T, channels], and write the states to the cache.

    slots: as in recurrence_reference. keys: [blocks, block_size, groups, head_dim], written in place.
    """
    inputs, added, read = (each.float() for each in (given.inputs, given.added, given.read))
    plane, size = keys.view(torch.float32), keys.shape[1]
    steps = functional.softplus(given.rates.float() + given.rate_bias)
    speed, gates = given.log_decay.exp(), functional.silu(given.gates.float())
    out, state = torch.empty_like(given.inputs), torch.empty(0)
    for token, (slot, before, begins, keeps) in enumerate(visits(slots, size)):
        if begins and before < 0:
            state = torch.zeros_like(speed)
        elif begins:
            state = read_numbers(plane[before // size], shape.plane_elements[0]).reshape(speed.shape)
        step, x = steps[token, :, None], inputs[token]
        state = torch.exp(-speed * step) * state + step * x[:, None] * added[token]
        out[token] = (state @ read[token] + given.skip * x) * gates[token]
        if keeps:
            write_numbers(plane[slot // size], state.view(shape.groups, -1))
    return out
