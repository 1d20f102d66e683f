"""Simulated prefill and decode pods, with the engine's scheduler and the gateway's router."""

import sys

import pytest

from baton_engine.config import CHUNK_MS
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


def test_the_command_prints_both_layouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pd_sim.py", "--load", "10,500,20", "--seconds", "2", "--seeds", "1"])
    pd_sim.main()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["replicas", "pd"]
