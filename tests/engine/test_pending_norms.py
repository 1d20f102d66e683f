"""A lone token whose norms are computed by the kernels after them gives the tokens of the CPU's runner."""

from typing import Any

import msgspec
import pytest
import torch

from baton_engine import cuda_runner
from baton_engine.ops import TORCH
from baton_engine.quantization import dense
from baton_kernels import linear as linear_kernels
from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.norm import pending_norm
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.norm import PendingNorm, pending_norm_reference
from baton_kernels.reference.routing import route_reference
from baton_kernels.routing import route
from tests.conftest import MakeModel

from .fake_cuda import pretend
from .harness import generate, make_engine, make_prompt, make_request

ONE_ROW = LinearConfig(1, 64, 64, 1, 4, 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "gemma3"])
def test_tokens(tiny_model: MakeModel, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(1, make_prompt(9), 5), make_request(2, make_prompt(30, seed=1), 5)]
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "enforce_eager": True}
    expected = generate(make_engine(tiny_model(family), **settings), requests).tokens
    found: list[type] = []

    # The interpreter is slow, so that it runs no kernels of prompts.
    def norm(x: torch.Tensor | PendingNorm, *others: Any) -> Any:
        alone = isinstance(x, torch.Tensor) and len(x) == 1
        return pending_norm(x, *others) if alone else pending_norm_reference(x, *others)

    def choose(x: torch.Tensor | PendingNorm, *others: Any) -> Any:
        return route(x, *others) if isinstance(x, PendingNorm) else route_reference(x, *others)

    def linear(x: torch.Tensor | PendingNorm, *others: Any) -> torch.Tensor:
        found.append(type(x))
        if isinstance(x, PendingNorm):
            return linear_kernels.linear(x, *others, config=ONE_ROW)
        return linear_reference(x, *others)

    pretend(monkeypatch)
    ops = msgspec.structs.replace(TORCH, keeps_codes=True, pending_norm=norm, linear=linear, route=choose)
    monkeypatch.setattr(cuda_runner, "TRITON", ops)
    monkeypatch.setattr(dense, "_pack", lambda _: None)
    engine = make_engine(tiny_model(family), **settings)
    found.clear()
    assert generate(engine, requests).tokens == expected
    assert PendingNorm in found
