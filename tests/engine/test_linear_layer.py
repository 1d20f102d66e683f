"""A linear layer reads the part of the checkpoint that its rank computes, in the order that its model wants."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton_engine.config import ConfigError
from baton_engine.layers.linear import Linear
from baton_engine.loading import Weights
from baton_engine.ops import TORCH
from baton_engine.quantization.dense import as_stored
from baton_engine.shard import Heads, OneRank, Replicated
from baton_engine.source import Source

INPUTS, OUTPUTS = 6, (8, 4)


class Half(Replicated):
    """One of two ranks, each of which computes half of the outputs or multiplies half of the inputs."""

    def __init__(self, rank: int, by_inputs: bool) -> None:
        self._rank, self._by_inputs = rank, by_inputs

    def _half(self, size: int) -> slice:
        return slice(self._rank * size // 2, (self._rank + 1) * size // 2)

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        return super().outputs(sizes) if self._by_inputs else [self._half(size) for size in sizes]

    def inputs(self, size: int) -> slice:
        return self._half(size) if self._by_inputs else slice(0, size)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"t.c.weight": torch.randn(INPUTS, 5)}
    for name, outputs in zip("ab", OUTPUTS, strict=True):
        tensors |= {f"t.{name}.weight": torch.randn(outputs, INPUTS), f"t.{name}.bias": torch.randn(outputs)}
    return tensors


@pytest.fixture
def source(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[Source]:
    save_file(tensors, tmp_path / "model.safetensors")
    with Weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        yield Source(weights, TORCH, as_stored).at("t")


def test_projections_are_stacked(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    x = torch.randn(3, INPUTS)
    y = Linear(source, ["a", "b"], list(OUTPUTS), INPUTS, bias=True)(x)
    expected = [x @ tensors[f"t.{name}.weight"].T + tensors[f"t.{name}.bias"] for name in "ab"]
    torch.testing.assert_close(y, torch.cat(expected, dim=1))


def test_a_rank_has_its_part_of_each_projection(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    x = torch.randn(3, INPUTS)
    for rank in (0, 1):
        y = Linear(source, ["a", "b"], list(OUTPUTS), INPUTS, bias=True, shard=Half(rank, by_inputs=False))(x)
        expected = [
            (x @ tensors[f"t.{name}.weight"].T + tensors[f"t.{name}.bias"]).chunk(2, dim=1)[rank] for name in "ab"
        ]
        torch.testing.assert_close(y, torch.cat(expected, dim=1))


def test_ranks_that_share_the_inputs_add_up(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    x = torch.randn(3, INPUTS)
    parts = [
        Linear(source, ["a"], [OUTPUTS[0]], INPUTS, shard=Half(rank, by_inputs=True))(half.contiguous())
        for rank, half in enumerate(x.chunk(2, dim=1))
    ]
    torch.testing.assert_close(sum(parts), x @ tensors["t.a.weight"].T)


def test_outputs_in_another_order(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    x, order = torch.randn(3, INPUTS), [3, 1, 0, 2]
    y = Linear(source, ["b"], [4], INPUTS, bias=True, order=order)(x)
    torch.testing.assert_close(y, (x @ tensors["t.b.weight"].T + tensors["t.b.bias"])[:, order])


def test_a_weight_that_is_stored_the_other_way_round(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    x = torch.randn(3, INPUTS)
    torch.testing.assert_close(Linear(source, ["c"], [5], INPUTS, transposed=True)(x), x @ tensors["t.c.weight"])
    with pytest.raises(ConfigError, match=r"t\.c\.weight in model\.safetensors is \[6, 5\]; .* calls for \[5, 6\]"):
        Linear(source, ["c"], [5], INPUTS)


def test_what_is_taken_keeps_its_dtype_only_where_it_is_asked_for(source: Source) -> None:
    assert source.take("a.bias", (8,)).dtype == torch.float32
    part = source.take("a.weight", (8, INPUTS), (slice(2, 4), slice(1, 3)), dtype=torch.float16)
    assert part.shape == (2, 2)
    assert part.dtype == torch.float16


class Third(OneRank):
    """One of three ranks."""

    count = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_a_rank_has_its_heads_of_a_fused_projection(source: Source, tensors: dict[str, torch.Tensor]) -> None:
    """Three ranks, six heads of one output each, and one head of keys, which all ranks have."""
    x, order = torch.randn(3, INPUTS), [5, 1, 4, 0, 7, 2, 6]
    whole = x @ tensors["t.a.weight"].T + tensors["t.a.bias"]
    for rank in range(3):
        shard = Heads(Third(rank), 1)
        y = Linear(source, ["a"], [8], INPUTS, bias=True, order=order, parts=[6, 1], shard=shard)(x)
        torch.testing.assert_close(y, whole[:, [*order[2 * rank : 2 * rank + 2], order[6]]])
        plain = Linear(source, ["a"], [8], INPUTS, bias=True, parts=[6, 1, 1], shard=shard)(x)
        torch.testing.assert_close(plain, whole[:, [2 * rank, 2 * rank + 1, 6, 7]])


def test_heads_that_cannot_be_divided_are_refused(source: Source) -> None:
    with pytest.raises(ConfigError, match="8 heads cannot be divided among 3 ranks: --tensor-parallel must divide it"):
        Linear(source, ["a"], [8], INPUTS, shard=Heads(Third(0), 1))
