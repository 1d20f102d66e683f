"""The benchmark of selected tokens measures what it names."""

import pytest
import torch

from baton_engine.attention.triton_indexed import TritonIndexed
from baton_engine.attention.triton_latent import TritonLatent
from baton_engine.latent_spec import IndexedLatentSpec
from loadtest.engine import attention_bench, selection_bench
from tests.engine.fake_cuda import pretend


def test_each_time_is_of_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    calls: list[str] = []
    for kind, name in ((TritonLatent, "attend"), (TritonIndexed, "select"), (TritonIndexed, "attend")):
        plain = getattr(kind, name)

        def noted(self: object, *inputs: object, plain: object = plain, name: str = f"{kind.__name__}.{name}") -> None:
            calls.append(name)
            plain(self, *inputs)  # type: ignore[operator]

        monkeypatch.setattr(kind, name, noted)
    steps: list[set[str]] = []

    def replayed(step: object) -> float:
        calls.clear()
        step()  # type: ignore[operator]
        steps.append(set(calls))
        return len(steps) * 1e-6

    monkeypatch.setattr(attention_bench, "replayed", replayed)
    spec = IndexedLatentSpec(
        scale=1.0, rank=8, rope_dim=4, key_dim=4, value_dim=4, selected=5, index_heads=2, index_dim=6
    )
    times = selection_bench.measure(2, spec, [3, 70], torch.device("cpu"))
    assert times == pytest.approx((1e-6, 2e-6, 1e-6))
    both = {"TritonIndexed.select", "TritonIndexed.attend", "TritonLatent.attend"}
    assert steps == [{"TritonLatent.attend"}, {"TritonIndexed.select"}, both]
