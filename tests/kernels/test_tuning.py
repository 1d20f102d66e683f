"""The kernel and the configuration that each matrix product gets."""

import json
from importlib import resources

import pytest
import torch

from baton_kernels import tuning
from baton_kernels.tuning import MOST_ROWS, LinearConfig, linear_config

DEVICE = torch.device("cuda")
TABLES = sorted(path.name for path in (resources.files("baton_kernels") / "tuned").iterdir())


@pytest.fixture(autouse=True)
def fresh_caches() -> None:
    tuning._choose.cache_clear()
    tuning._table.cache_clear()


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
            assert config.block_rows == 1 if rows == 1 else config.block_rows >= 16
            for size in (config.block_rows, config.block_outputs, config.block_inner, config.num_warps):
                assert size & (size - 1) == 0, config
            assert config.splits * config.block_inner <= inner


def test_an_entry_holds_up_to_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    eight, many = (16, 32, 64, 1, 4, 3), (64, 64, 64, 2, 4, 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(tuning, "_table", lambda _: {"512x256": {"8": eight, "32": None, "64": many}})
    chosen = [linear_config(rows, 512, 256, False, DEVICE) for rows in (1, 8, 9, 32, 33, 64, 65, 1000)]
    assert chosen == [LinearConfig(*eight)] * 2 + [None] * 2 + [LinearConfig(*many)] * 2 + [None] * 2


def test_what_was_not_measured_goes_to_cublas_but_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU nobody has")
    assert linear_config(2, 512, 80, False, DEVICE) is None
    config = linear_config(1, 512, 80, False, DEVICE)
    assert config is not None
    assert (config.block_rows, config.block_inner) == (1, 128)
