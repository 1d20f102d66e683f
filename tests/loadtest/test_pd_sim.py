"""Simulated prefill and decode pods, with the engine's scheduler and the gateway's router."""

import sys

import pytest

from baton_engine.config import CHUNK_MS
from baton_gateway.routing.cost import CostModel
from loadtest.common.sim_engine import Device, EnginePod, Job
from loadtest.common.sim_pod import Clock
from loadtest.handover import pd_sim


def test_a_lone_request_takes_the_times_of_its_steps() -> None:
    clock, device = Clock(), Device(1.0, 0.01, 0.0, 0.5, 0.0, 0.0)
    tokens: list[float] = []
    pod = EnginePod(clock, device, CHUNK_MS)
    pod.prefill(Job(100, 3, lambda: tokens.append(clock.now)))
    clock.run()
    assert tokens == pytest.approx([2.0, 2.5, 3.0])
    assert (pod.num_requests, pod.blocks_held) == (0, 0)


def test_a_handed_over_request_goes_on_with_its_second_token() -> None:
    clock, device = Clock(), Device(1.0, 0.01, 0.0, 0.5, 0.0, 0.0)
    tokens: list[float] = []
    prefill, decode = EnginePod(clock, device, 1e6, prefill_only=True), EnginePod(clock, device, CHUNK_MS)
    job = Job(100, 3, lambda: tokens.append(clock.now))
    decode.reserve(job)

    def handed_over() -> None:
        prefill.release(first)
        decode.decode(job)

    first = Job(100, 1, lambda: clock.at(clock.now + 0.25, handed_over))
    prefill.prefill(first, exports=True)
    clock.run()
    assert tokens == pytest.approx([2.75, 3.25])
    assert (prefill.blocks_held, decode.blocks_held) == (0, 0)


@pytest.mark.parametrize("load", ["20.2,1024,128", "34.8,1024,128", "4.3,4000,200", "8.0,4000,200"])
def test_first_tokens_are_as_soon_as_on_replicas(load: str) -> None:
    """One prefill and one decode pod do not let prompts queue on the one while the other could compute them."""
    # The times of its steps grow evenly with their tokens, so that the router predicts them well.
    device = Device()
    replicas = pd_sim.measure(load, 0, 2, CostModel(), CHUNK_MS, 60, 3, device)
    pd = pd_sim.measure(load, 1, 1, CostModel(), CHUNK_MS, 60, 3, device)
    assert pd.ttft_p50 <= 1.1 * replicas.ttft_p50
    assert pd.ttft_p99 <= 1.1 * replicas.ttft_p99
    # Both would hold if all prompts were computed on the decode pod. At least half of them are not.
    assert pd.local < 0.5


@pytest.mark.parametrize(("pods", "layouts"), [("2", ["replicas", "pd"]), ("1", ["replicas"])])
def test_the_command_prints_each_layout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pods: str, layouts: list[str]
) -> None:
    arguments = ["--load", "10,500,20", "--seconds", "2", "--seeds", "1", "--pods", pods]
    monkeypatch.setattr(sys, "argv", ["pd_sim.py", *arguments])
    pd_sim.main()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == layouts
