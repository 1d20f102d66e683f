"""The kernel and the configuration that each matrix product gets."""

import itertools
import json
from collections.abc import Iterator
from importlib import resources
from types import SimpleNamespace

import pytest
import torch

from baton_kernels import tuning, unmeasured
from baton_kernels import unmeasured_hopper as hopper
from baton_kernels.hopper_few_numbers import few_numbers_candidates
from baton_kernels.hopper_few_rows import ROWS
from baton_kernels.kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product, ProductConfig
from baton_kernels.reference.scaled_linear import ScaledWeight
from baton_kernels.tuning import MOST_ROWS, experts_config, linear_config
from baton_kernels.unmeasured_hopper import (
    CODES,
    DENSE,
    NUMBERS,
    Operands,
    hopper_candidates,
    scaled_numbers,
    unmeasured_hopper,
)

DEVICE = torch.device("cuda")
FP8 = torch.float8_e4m3fn
# Codes of 4 bits, 16 bits, and 8 bits with a scale for each output and in tiles.
OPERANDS = (
    CODES,
    NUMBERS,
    DENSE,
    *(
        scaled_numbers(ScaledWeight(torch.zeros(1, 256, dtype=dtype), torch.ones(1, 1), tile))
        for dtype, tile in ((FP8, (1, 256)), (FP8, (128, 128)), (torch.int8, (1, 256)))
    ),
)
TABLES = sorted(path.name for path in (resources.files("baton_kernels") / "tuned").iterdir())


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    caches = tuning._choose, tuning._table, tuning._measured_experts
    for cached in (*caches, unmeasured._is_hopper_or_newer, unmeasured._processors, hopper._processors):
        cached.cache_clear()
    yield
    for cached in (*caches, unmeasured._is_hopper_or_newer, unmeasured._processors, hopper._processors):
        cached.cache_clear()


@pytest.mark.parametrize("name", TABLES)
def test_each_entry_can_be_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name.removesuffix(".json"))
    table = json.loads((resources.files("baton_kernels") / "tuned" / name).read_text())
    assert table
    for product, choices in table.items():
        shape, gated = product.split(" ")[0], product.endswith(" gated")
        outputs, inner = map(int, shape.split("x"))
        bounds = [int(rows) for rows in choices]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= MOST_ROWS
        for rows in range(1, MOST_ROWS + 2):
            config = linear_config(rows, outputs, inner, gated, DEVICE)
            if config is None:
                continue
            assert rows <= MOST_ROWS
            if config.hopper and rows <= ROWS and config.block_rows == ROWS:
                assert config in few_numbers_candidates(rows, Product(outputs, inner, gated))
            else:
                assert config.block_rows == 1 if rows == 1 else config.block_rows >= 16
            for size in (config.block_rows, config.block_outputs, config.block_inner, config.num_warps):
                assert size & (size - 1) == 0, config
            assert config.splits * config.block_inner <= inner


def test_an_entry_holds_up_to_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    eight, many = (16, 32, 64, 1, 4, 3), (64, 64, 64, 2, 4, 4)
    monkeypatch.setattr(tuning, "_table", lambda *_: {"512x256": {"8": eight, "32": None, "64": many}})
    chosen = [linear_config(rows, 512, 256, False, DEVICE) for rows in (1, 8, 9, 32, 33, 64, 65, 1000)]
    assert chosen == [LinearConfig(*eight)] * 2 + [None] * 2 + [LinearConfig(*many)] * 2 + [None] * 2


def test_what_was_not_measured_goes_to_cublas_but_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 0))
    assert linear_config(2, 512, 80, False, DEVICE) is None
    config = linear_config(1, 512, 80, False, DEVICE)
    assert config is not None
    assert (config.block_rows, config.block_inner) == (1, 128)


def test_a_gpu_without_tables_has_those_of_the_same_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    assert linear_config(8, 4096, 4096, False, DEVICE) == LinearConfig(16, 64, 128, 1, 4, 8, hopper=True)


@pytest.mark.parametrize("inner", [1152, 2304, 3072, 3840, 5120, 8192, 12_288, 29_568])
@pytest.mark.parametrize("outputs", [256, 1280, 3840, 5120, 8448, 10_240, 35_840, 262_208])
def test_hopper_has_rules_for_what_was_not_measured(outputs: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles fit into a multiprocessor, and parts are of equal size and run at the same time."""
    pretend(monkeypatch, (9, 0))
    for gated in (False, True):
        assert linear_config(65, outputs, inner, gated, DEVICE) is None
        assert linear_config(16, outputs, inner + 4, gated, DEVICE) is None
        for rows in (2, 16, 17, 32, 33, 64):
            config = linear_config(rows, outputs, inner, gated, DEVICE)
            if config is None:
                assert rows > 16
                continue
            assert config.block_rows == max(1 << (rows - 1).bit_length(), 16)
            stage = 2 * config.block_inner * (config.block_outputs * (1 + gated) + config.block_rows)
            assert stage * config.num_stages <= 227 << 10
            if config.splits > 1:
                assert inner % (config.splits * config.block_inner) == 0
                assert -(-outputs // config.block_outputs) * config.splits <= 132


@pytest.mark.parametrize("inner", [32, 96, 768, 2880, 14_336])
@pytest.mark.parametrize("outputs", [64, 600, 6144, 28_672])
@pytest.mark.parametrize("operands", OPERANDS)
def test_tiles_fit_into_hopper(operands: Operands, outputs: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are some for every shape, each part has a step, and sums fit into the registers."""
    pretend(monkeypatch, (9, 0))
    for rows, gated in itertools.product((1, 16, 17, 64, 100, 128, 256, 2048, 5000), (False, True)):
        candidates = hopper_candidates(operands, rows, Product(outputs, inner, gated), DEVICE)
        assert candidates[0] == unmeasured_hopper(operands, rows, outputs, inner, gated, DEVICE)
        for config in candidates:
            stage = config.block_inner * (config.block_outputs * operands.weight + operands.row * config.block_rows)
            assert stage * config.num_stages < 225 << 10
            assert config.splits == 1 or config.splits * config.block_inner <= inner
            assert config.block_rows * config.block_outputs <= operands.sums * 32 * config.num_warps


def pretend(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    patch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU nobody has")
    patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    properties = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_experts_of_a_measured_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned holds up to its number of tokens, and the last for all larger numbers."""
    pretend(monkeypatch, (8, 0))
    monkeypatch.setattr(tuning, "_learned", {})
    few = ExpertsConfig(1, ProductConfig(2, 1024, 4, 1), ProductConfig(2, 128, 4, 1))
    many = ExpertsConfig(64, ProductConfig(128, 64, 8, 3), ProductConfig(256, 64, 8, 3), hopper=True)
    tuning.learn("", ExpertLayer(8, 128, 2048, 768), DEVICE, {4: few, 64: many})

    def chosen(tokens: int, size: int = 768, element: int = 2, device: torch.device = DEVICE) -> ExpertsConfig:
        return experts_config(tokens, 8, 128, 2048, size, element, device)

    assert [chosen(tokens) for tokens in (1, 4, 5, 64, 65, 4000)] == [few] * 2 + [many] * 4
    others = chosen(64, size=1024), chosen(64, element=4), chosen(64, device=torch.device("cpu"))
    assert [(config.block_rows, config.hopper) for config in others] == [(16, False)] * 3


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(("count", "experts", "size"), [(8, 128, 512), (2, 8, 16384), (4, 32, 2048), (6, 160, 1536)])
def test_experts_that_were_not_measured(
    count: int, experts: int, size: int, capability: tuple[int, int], element: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    configs = [experts_config(n, count, experts, 2048, size, element, DEVICE) for n in (1, 2, 64, 500, 20_000)]
    assert [config.block_rows for config in configs[:1]] == [1], "one token reads its own experts alone"
    assert configs[-1].block_rows == (128 if element == 2 else 64)
    for config in configs:
        assert isinstance(config, ExpertsConfig)
        if config.block_rows > 1:
            for tiles, weights in ((config.gate_up, 2), (config.down, 1)):
                stage = (weights * tiles.block_outputs + config.block_rows) * tiles.block_inner * element
                assert stage * tiles.num_stages <= 227 << 10, "the shared memory of a multiprocessor"
