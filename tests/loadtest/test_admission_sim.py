"""The simulator of admission, and that requests which wait for room to grow are answered no later in all."""

import sys
from dataclasses import replace

import pytest

from loadtest.common.sim_engine import BLOCK_SIZE
from loadtest.engine.admission_sim import DEVICES, FixedMargin, Load, MeasuredScheduler, main, replay

SMALL = replace(DEVICES["70b-tp2"], num_blocks=51_200 // BLOCK_SIZE)
# All answers of a known length, and lengths that the engine learns from those that have ended.
KNOWN, LEARNED = Load(120, 200, 600), Load(400, 300, 2000, median=300)


@pytest.mark.parametrize("load", [KNOWN, LEARNED])
@pytest.mark.parametrize("rule", [FixedMargin, MeasuredScheduler])
def test_every_request_gets_exactly_its_tokens(load: Load, rule: type[MeasuredScheduler]) -> None:
    outcome = replay(load, SMALL, rule)
    assert [len(times) for times in outcome.tokens] == load.outputs(0)
    assert all(times == sorted(times) for times in outcome.tokens)
    recomputed = outcome.prompt_tokens - load.requests * load.prompt
    assert (recomputed > 0) == (outcome.preemptions > 0)


@pytest.mark.parametrize(("load", "least_rate"), [(KNOWN, 1.0), (LEARNED, 0.98)])
def test_waiting_for_room_to_grow_avoids_preemptions(load: Load, least_rate: float) -> None:
    before, now = replay(load, SMALL, FixedMargin), replay(load, SMALL, MeasuredScheduler)
    assert now.preemptions <= before.preemptions / 4
    assert now.prompt_tokens < before.prompt_tokens
    assert now.rate >= least_rate * before.rate


def test_lengths_depend_on_the_seed_only() -> None:
    assert LEARNED.outputs(1) == LEARNED.outputs(1) != LEARNED.outputs(2)
    assert 250 < sorted(LEARNED.outputs(1))[200] < 350


def test_the_command_prints_both_rules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "8b", "--requests", "8", "--prompt", "100", "--limit", "40", "--kv-tokens", "1000"]
    monkeypatch.setattr(sys, "argv", ["admission_sim.py", *options])
    main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("admission")
    assert [row[:12].strip() for row in rows] == ["fixed margin", "growth"]
    assert all("of 800" in row for row in rows)


@pytest.mark.parametrize("option", [["--prompt", "0"], ["--kv-tokens", "100"], ["--sigma", "-1"]])
def test_bad_options_are_named(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["admission_sim.py", *option])
    with pytest.raises(SystemExit):
        main()
    assert option[0] in capsys.readouterr().err.splitlines()[-1]
