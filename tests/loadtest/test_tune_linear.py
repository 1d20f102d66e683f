"""The tuner of products measures candidates and writes tables that the kernels' look-up reads."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels import tuning
from baton_kernels.kernel_configs import LinearConfig
from tests.conftest import MakeModel

CANDIDATES = [LinearConfig(1, 16, 64, 1, 4, 1), LinearConfig(16, 16, 64, 1, 4, 2), LinearConfig(16, 32, 64, 2, 4, 2)]


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_tables_have_the_fastest_products(
    tiny_model: MakeModel, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadtest.engine import tune_linear, tuned_formats

    folder = tiny_model("llama", hidden_size=64, intermediate_size=128)
    (tmp_path / f"{name}_some_gpu.json").write_text(json.dumps({"3x4": {"1": None}}))
    times = iter(range(10_000, 0, -1))

    def seconds(run: Callable[[int], Any], count: int) -> float:
        """Pretend that each measured product is faster than the one before."""
        assert run(count - 1).isfinite().all()
        return next(times)

    class Pool:
        def __init__(self, processes: int) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def map(self, run: Callable[[Any], None], parts: list[Any], size: int) -> None:
            assert sum(map(len, parts)) >= len(CANDIDATES)
            run(parts[0][:2])

    format = tuned_formats.FORMATS[name]
    monkeypatch.setattr(tuned_formats, "DEVICE", "cpu")
    monkeypatch.setattr(tuned_formats, "WEIGHT_BYTES", 1 << 14)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(tune_linear, "seconds", seconds)
    monkeypatch.setattr(tune_linear.multiprocessing, "get_context", lambda _: tune_linear.multiprocessing)
    monkeypatch.setattr(tune_linear.multiprocessing, "Pool", Pool)
    monkeypatch.setattr(format, "rows", (1, 5))
    monkeypatch.setattr(format, "candidates", lambda product, rows: CANDIDATES[: 3 if rows > 1 else 1])
    # The interpreter does not multiply tiles of bfloat16.
    monkeypatch.setattr(torch, "bfloat16", torch.float16)
    monkeypatch.setattr(sys, "argv", ["tune_linear.py", "--formats", name, "--out", str(tmp_path), str(folder)])
    tune_linear.main()
    table = json.loads((tmp_path / f"{name}_some_gpu.json").read_text())
    assert table.pop("3x4") == {"1": None}
    ungated = set() if name == "int4" else {"256x64"}
    assert set(table) == {"128x64", "64x64", "256x64 gated", "64x128", *ungated}
    monkeypatch.setattr(tuning, "_read_table", lambda path: json.loads((tmp_path / path).read_text()))
    for cached in (tuning._measured, tuning._table):
        cached.cache_clear()
    device = torch.device("cuda")
    shape = name, 256, 64, True, device
    chosen = [tuning.quantized_config(rows, *shape, default=lambda *_: None) for rows in (1, 2, 5, 6)]
    assert chosen == [CANDIDATES[0], *[CANDIDATES[2]] * 3]
    assert tuning.compile_first(*shape) == [CANDIDATES[0], CANDIDATES[2]]
    assert tuning.compile_first(*shape) == []
    tuning._compiled.clear()
    for cached in (tuning._measured, tuning._table):
        cached.cache_clear()
    assert tuning.quantized_config(1, name, 3, 5, False, torch.device("cpu"), lambda *_: CANDIDATES[1]) == CANDIDATES[1]
