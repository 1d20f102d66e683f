"""Recurrent states in the paged cache: the gated delta rule (Yang et al., "Gated Delta Networks", 2025), also with a
decay for each element of a key (Kimi Team, "Kimi Linear", 2025), and Mamba 2 (Dao and Gu, "Transformers are SSMs",
2024).

Each head has a state, a matrix that maps keys to values. A token lets the state decay and adds its own value for its
key, in Mamba 2 times the length of its step. By the delta rule it replaces a part of the value that the state has for
its key instead. Then it reads the state with its query. Queries, keys and values are results of a short convolution
over the inputs of the last tokens. Mamba 2 calls them C, B and x.

A block of the cache has room for the keys and values of many tokens. In a layer with states it holds, instead of these,
the state after the block's last token that is computed so far, and the last inputs of the convolution. So the states of
a sequence move from block to block, and a block that is complete holds what a sequence with the same beginning needs to
go on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from .state_blocks import (
    places_before,
    planes_for,
    read_numbers,
    recent_places,
    rows_for,
    visits,
    write_numbers,
)

NORM_EPS = 1e-6  # of the norms of queries and keys


class StateShape(NamedTuple):
    """The heads of a layer. Consecutive value heads share a key head.

    groups: equal parts into which the heads are divided. Their number divides that of the cache's key-value heads, so
    that each has the places of one or more of these. length: elements of the convolution's filter, which are tokens.
    """

    groups: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    length: int

    def part(self, ranks: int) -> "StateShape":
        """Return the shape of what each of so many ranks has."""
        return self._replace(
            groups=self.groups // ranks, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks
        )

    @property
    def keys(self) -> int:
        """The elements of a token's keys, and those of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def group_heads(self) -> int:
        """The value heads of a group."""
        return self.value_heads // self.groups

    @property
    def first_heads(self) -> int:
        """How many of a group's states lie in the plane of keys."""
        return -(-self.group_heads // 2)

    @property
    def first_input(self) -> int:
        """Where the inputs of the convolution begin among a group's numbers in the plane of values."""
        return (self.group_heads - self.first_heads) * self.key_dim * self.value_dim

    @property
    def recent(self) -> int:
        """As recent_places returns."""
        return recent_places(self.length)

    @property
    def plane_elements(self) -> tuple[int, int]:
        """The float32 numbers of a group in the plane of keys and in that of values.

        The plane of keys has the first states of the group, [key_dim, value_dim] each. That of values has its other
        states and then the inputs, [recent, channels of the group].
        """
        state = self.key_dim * self.value_dim
        inputs = self.recent * self.channels // self.groups
        return self.first_heads * state, self.first_input + inputs

    def rows(self, head_bytes: Sequence[int]) -> int:
        """As rows_for returns."""
        return rows_for(self.plane_elements, head_bytes)

    def planes(self, cache: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As planes_for returns."""
        return planes_for(self.plane_elements, cache, self.groups)


class StateInputs(NamedTuple):
    """What a layer gives the heads of a step's tokens.

    inputs: [T, channels], those of the convolution: queries, keys, values. filters: [channels, length], the last
    element for the token itself. bias: [channels], of the convolution. rates: [T, value_heads]: a token's step has the
    length softplus(rate + rate_bias), and a state decays by exp(-exp(log_decay) * step). With the delta rule, rates can
    also be [T, value_heads * key_dim], with such a step for each element of a key. None = all steps have the length 1,
    as in lightning attention, which is Mamba 2 apart from that. gates: [T, value_heads], with the
    delta rule: most * sigmoid(gate) is the part of the known value that is replaced; None = Mamba 2. log_decay:
    [value_heads] float32. rate_bias: float32, as many as a token has rates. skip: [value_heads] float32, of the token's
    value in the result. least: unless it is 0, a state decays by exp(least * sigmoid(exp(log_decay) * (rate +
    rate_bias))) instead. filters are contiguous, and so is each row of inputs, rates and gates.
    """

    inputs: torch.Tensor
    filters: torch.Tensor
    bias: torch.Tensor | None
    rates: torch.Tensor | None
    gates: torch.Tensor | None
    log_decay: torch.Tensor
    rate_bias: torch.Tensor | None
    skip: torch.Tensor | None
    most: float = 1.0
    least: float = 0.0

    @property
    def by_element(self) -> bool:
        """Whether each element of a key has a rate."""
        return self.rates is not None and self.rates.shape[1] > len(self.log_decay)


def recurrence_reference(
    given: StateInputs,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: StateShape,
    single: bool = False,
) -> torch.Tensor:
    """Return what the heads read from their states, [T, value_heads, value_dim], and write states and inputs to the
    cache.

    slots: [2, T] int64, those of the token and of the token before it; -1 = there is no such token, or for the token
    itself, nothing is written. Where both are -1, the result is 0. keys, values: as StateShape.planes returns them,
    written in place: the bytes of a block are the float32 numbers of `StateShape.plane_elements`, one row after
    another. Blocks lie one after another, but values may be the last rows of the blocks of keys, where the cache has
    one plane. single: no sequence has more than a few tokens, so that a kernel computes them one after another.
    """
    inputs, filters, bias, rates, gates, log_decay, rate_bias, skip, most, least = given
    planes, size = [plane.view(torch.float32) for plane in (keys, values)], keys.shape[1]
    weights = _by_group(filters.T, shape).float()
    rows = _by_group(inputs, shape)
    added = 0.0 if bias is None else _by_group(bias[None], shape)[0].float()
    # [T, value_heads, elements of a key or 1]
    speed, moves = torch.exp(log_decay)[:, None], inputs.new_zeros(())
    steps = torch.ones(len(inputs), shape.value_heads, 1, device=inputs.device)
    if rates is not None:
        assert rate_bias is not None
        moves = (rates.float() + rate_bias).unflatten(1, (shape.value_heads, -1))
        steps = functional.softplus(moves)
    decay = torch.exp(least * torch.sigmoid(speed * moves) if least else -speed * steps)
    parts = steps[..., 0] if gates is None else most * gates.float().sigmoid()
    out = inputs.new_zeros(len(inputs), shape.value_heads, shape.value_dim)
    state, recent = torch.empty(0), torch.empty(0)
    for token, (slot, last, begins, keeps) in enumerate(visits(slots, size)):
        if slot < 0 and last < 0:
            continue
        if begins:
            state, recent = _read(planes, last // size, last % size, shape)
            if last < 0:
                state, recent = torch.zeros_like(state), torch.zeros_like(recent)
        window = torch.cat([recent, rows[token : token + 1].float()])
        recent = window[1:]
        mixed = functional.silu((window * weights).sum(0) + added).to(inputs.dtype).float()
        q, k, v = _heads(mixed, shape)
        state = state * decay[token, :, :, None]
        new = v
        if gates is not None:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
            q = q * shape.key_dim**-0.5
            new = v - (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (new * parts[token, :, None])[:, None]
        result = (state * q[:, :, None]).sum(1)
        out[token] = result if skip is None else result + skip[:, None] * v
        if keeps:
            _write(planes, slot // size, slot % size, state, recent, shape)
    return out


def _by_group(inputs: torch.Tensor, shape: StateShape) -> torch.Tensor:
    """Return [T, channels] as [T, groups, channels of a group]: in each group queries, keys, values."""
    parts = inputs.split([shape.keys, shape.keys, shape.values], dim=1)
    return torch.cat([part.unflatten(1, (shape.groups, -1)) for part in parts], dim=2)


def _heads(mixed: torch.Tensor, shape: StateShape) -> list[torch.Tensor]:
    """Return queries, keys and values, [value_heads, dim] each, of [groups, channels of a group]."""
    per_group = [part // shape.groups for part in (shape.keys, shape.keys, shape.values)]
    q, k, v = (part.flatten() for part in mixed.split(per_group, dim=1))
    shared = shape.value_heads // shape.key_heads
    q, k = (part.unflatten(0, (shape.key_heads, -1)).repeat_interleave(shared, dim=0) for part in (q, k))
    return [q, k, v.unflatten(0, (shape.value_heads, -1))]


def _read(planes: list[torch.Tensor], block: int, place: int, shape: StateShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states [value_heads, key_dim, value_dim] and the inputs [length - 1, groups, channels of a group], the
    oldest first, of a block whose last token has this place."""
    first, rest = (read_numbers(plane[block], count) for plane, count in zip(planes, shape.plane_elements, strict=True))
    state = shape.key_dim * shape.value_dim
    split = (shape.group_heads - shape.first_heads) * state
    second, recent = rest[:, :split], rest[:, split:]
    states = torch.cat([first, second], dim=1).view(shape.value_heads, shape.key_dim, shape.value_dim)
    recent = recent.unflatten(1, (shape.recent, shape.channels // shape.groups)).transpose(0, 1)
    return states, recent[places_before(place, shape.length)]


def _write(
    planes: list[torch.Tensor], block: int, place: int, states: torch.Tensor, recent: torch.Tensor, shape: StateShape
) -> None:
    """Write what `_read` returns."""
    grouped = states.view(shape.groups, -1)
    split = shape.first_heads * shape.key_dim * shape.value_dim
    placed = recent.new_zeros(shape.recent, *recent.shape[1:])
    placed[places_before(place, shape.length)] = recent
    rest = torch.cat([grouped[:, split:], placed.transpose(0, 1).flatten(1)], dim=1)
    for plane, numbers in zip(planes, (grouped[:, :split], rest), strict=True):
        write_numbers(plane[block], numbers)
