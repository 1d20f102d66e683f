"""The forward pass that all families share."""

from types import SimpleNamespace
from typing import Any

import torch

from baton_engine.models.decoder import Decoder
from baton_engine.stage import Stage


def test_a_stage_leaves_what_it_has_received_as_it_was() -> None:
    """The next step may receive only a part of the same memory, and layers add to their input in place."""
    source: Any = SimpleNamespace(dtype=torch.float32, stage=Stage(1, 3))
    stage = Decoder(source)
    stage.layers = [lambda x, ctx: x.add_(1), lambda x, ctx: x.mul_(3)]
    received = torch.ones(2, 4)
    context: Any = SimpleNamespace(received=received)
    assert torch.equal(stage(context), torch.full((2, 4), 6.0))
    assert torch.equal(received, torch.ones(2, 4))
