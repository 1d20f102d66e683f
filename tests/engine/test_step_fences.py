"""A rank finds the fence that the engine process means, whose own steps have other fences."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton_common.extent import Extent
from baton_engine.executor import StepMark
from baton_engine.pairs.messages import PackParts, UnpackParts
from baton_engine.ranks.messages import decode, encode
from baton_engine.ranks.step_fences import StepFences


def launched(number: int) -> Any:
    return SimpleNamespace(behind_layers=lambda layers: f"layer {layers} of {number}")


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (StepMark(20), "end of 20"),
        (StepMark(19, 4), "layer 4 of 19"),
        (StepMark(13), "end of 13"),
        # Steps that ended long ago have no fence of their own left. A fence of a later step is right, too.
        (StepMark(12), "end of 13"),
        (StepMark(12, 4), "end of 13"),
    ],
)
def test_a_mark_names_a_step_or_its_layers(mark: StepMark, expected: str) -> None:
    fences = StepFences()
    for number in range(1, 21):
        end: Any = f"end of {number}"
        fences.add(launched(number), end)
    assert fences.at(mark) == expected


def test_nothing_is_launched_yet() -> None:
    assert StepFences().at(StepMark(0)) is None


@pytest.mark.parametrize("mark", [None, StepMark(7), StepMark(7, 3)])
def test_a_mark_reaches_the_other_ranks(mark: StepMark | None) -> None:
    extent = Extent(first_token=0, num_tokens=9, first_layer=0, num_layers=2, first_head=0, num_heads=1)
    pack, unpack = PackParts(1, 2, 0, [[4]], extent, True, mark), UnpackParts(3, 2, 0, [[4]], extent, mark)
    assert decode(encode(pack)) == pack
    assert decode(encode(unpack)) == unpack
