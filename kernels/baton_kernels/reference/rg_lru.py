"""The real-gated linear recurrent unit over paged states (De et al., "Griffin", 2024).

Each channel has one number as its state. A token lets the state decay and adds the channel's input, and the sum is the
result. Two gates, which depend on the token, say how much of the state stays and how much of the input is added. The
less of the state stays, the larger is the factor of the input, so that states keep their size.

In the cache a layer has, in place of keys, the states, and in place of values, the last inputs of the convolution that
computes these inputs (reference/selective_scan.py, which also has the shape of both). reference/recurrence.py describes
how states move from block to block.
"""

from typing import NamedTuple

import torch

from .selective_scan import ChannelShape
from .state_blocks import read_numbers, visits, write_numbers


class UnitInputs(NamedTuple):
    """What a layer gives the channels of a step's tokens.

    inputs, input_gates, decay_gates: [T, channels], contiguous. input_bias, decay_bias: [channels] float32, which are
    added to the gates before their sigmoid. speed: [channels] float32, at least 0. A state decays by
    a = exp(-speed * sigmoid(decay_gate + decay_bias)).
    """

    inputs: torch.Tensor
    input_gates: torch.Tensor
    decay_gates: torch.Tensor
    input_bias: torch.Tensor
    decay_bias: torch.Tensor
    speed: torch.Tensor


def rg_lru_reference(given: UnitInputs, slots: torch.Tensor, keys: torch.Tensor, shape: ChannelShape) -> torch.Tensor:
    """Return the states after each token, [T, channels], and write them to the cache.

    A state becomes a * state + sqrt(1 - a^2) * sigmoid(input_gate + input_bias) * input. The first token of a
    sequence has no state before it, and its input has the factor 1 in place of the root. All this is computed in
    float32. slots: as in recurrence_reference. keys: [blocks, block_size, groups, head_dim], written in place. shape:
    with one element in each state.
    """
    plane, size = keys.view(torch.float32), keys.shape[1]
    log_decay = -given.speed * torch.sigmoid(given.decay_gates.float() + given.decay_bias)
    decay, factor = log_decay.exp(), torch.sqrt(-torch.expm1(2 * log_decay))
    inputs = torch.sigmoid(given.input_gates.float() + given.input_bias) * given.inputs.float()
    out, state = torch.empty_like(inputs), torch.empty(0)
    for token, (slot, before, begins, keeps) in enumerate(visits(slots, size)):
        if begins and before >= 0:
            state = read_numbers(plane[before // size], shape.plane_elements[0]).flatten()
        if begins and before < 0:
            state = inputs[token]
        else:
            state = decay[token] * state + factor[token] * inputs[token]
        out[token] = state
        if keeps:
            write_numbers(plane[slot // size], state.view(shape.groups, -1))
    return out.to(given.inputs.dtype)
