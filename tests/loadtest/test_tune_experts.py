"""The tuner of experts measures candidates and writes a table that the kernels' look-up reads."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels import tuning
from tests.conftest import MakeModel


@pytest.mark.parametrize(("family", "format"), [("gpt_oss", "bf16"), ("gpt_oss", "e2m1"), ("llama", "bf16")])
def test_the_table_has_the_fastest_candidates(
    tiny_model: MakeModel, family: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadtest.engine import tune_experts, tuned_formats

    folder = tiny_model(family, hidden_size=32, intermediate_size=32, num_experts_per_tok=1)
    out = tmp_path / ("experts_some_gpu.json" if format == "bf16" else "experts_e2m1_some_gpu.json")
    out.write_text(json.dumps({"1 of 2, 3x4": {"1": [1, [1, 16, 1, 1], [1, 16, 1, 1]]}}))

    def seconds(run: Callable[[int], object], count: int) -> float:
        """Pretend that wide tiles are fast, and blocks of rows slow for one token."""
        config = run.keywords["config"]  # type: ignore[attr-defined]
        return (config.block_rows * 1000 + 500) / (config.gate_up.block_outputs + config.down.block_outputs)

    class Pool:
        def __init__(self, processes: int) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def map(self, run: Callable[[Any], None], parts: list[Any], size: int) -> None:
            run(parts[0][:2])

    monkeypatch.setattr(tune_experts, "DEVICE", "cpu")
    monkeypatch.setattr(tuned_formats, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(tune_experts, "TOKENS", (1,))
    monkeypatch.setattr(tune_experts, "seconds", seconds)
    monkeypatch.setattr(tune_experts.multiprocessing, "get_context", lambda _: tune_experts.multiprocessing)
    monkeypatch.setattr(tune_experts.multiprocessing, "Pool", Pool)
    monkeypatch.setattr(tune_experts, "block_tiles", lambda *_: [tuning.ProductConfig(128, 64, 4, 2)])
    monkeypatch.setattr(tune_experts, "row_tiles", lambda *_: [tuning.ProductConfig(n, 128, 4, 1) for n in (32, 128)])
    coded = [tuning.ProductConfig(n, 128, 4, 2) for n in (16, 32)]
    monkeypatch.setattr(tune_experts, "coded_tiles", lambda *_: coded)
    # The interpreter does not multiply tiles of bfloat16.
    monkeypatch.setattr(torch, "bfloat16", torch.float16)
    monkeypatch.setattr(sys, "argv", ["tune_experts.py", "--formats", format, "--out", str(tmp_path), str(folder)])
    tune_experts.main()
    table = json.loads(out.read_text())
    assert table.pop("1 of 2, 3x4")
    assert list(table) == (["1 of 6, 32x32"] if family == "gpt_oss" else [])
    for choices in table.values():
        by_rows = [1, [128, 128, 4, 1, False], [128, 128, 4, 1, False]]
        assert choices["1"] == (by_rows if format == "bf16" else [16, [32, 128, 4, 2, False], [32, 128, 4, 2, False]])
        assert list(choices) == ["1"]
