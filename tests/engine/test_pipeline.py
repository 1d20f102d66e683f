"""The time at which the next step is launched while the device still computes the last one."""

from pathlib import Path

import numpy as np
import pytest

from baton_engine.engine import Engine
from baton_engine.executor import WithoutLayers
from baton_engine.pipeline import Pipeline
from baton_engine.results import Results
from baton_engine.sequence import Sequence
from baton_engine.step import Step
from baton_engine.step_plan import StepPlan
from baton_engine.step_times import StepTimes, StepWork

from .harness import make_request
from .ledger import LedgerRunner, LedgerStep, make_ledger_engine


class Clock:
    """A time.monotonic that advances by a tick at every call."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("baton_engine.pipeline.time.monotonic", clock)
    return clock


class StepInFlight(WithoutLayers):
    """A Launched step that is done once `over` is set."""

    over = False

    def draw_masked(self, masks: np.ndarray) -> None: ...

    def wait(self) -> Results:
        return Results([[]])

    def done(self) -> bool:
        return self.over

    def launch(self, plan: StepPlan) -> "StepInFlight":
        return self


def step_of(*counts: int) -> Step:
    step = Step([], StepPlan(), [])
    for id, count in enumerate(counts):
        step.put(Sequence(make_request(id, [1] * (count + 1), 1), 0, 4, 4096), count, 0)
    return step


@pytest.mark.parametrize("counts", [(200,), (1, 1, 200)], ids=["prompt", "prompt beside decodes"])
def test_it_is_full_until_shortly_before_prompts_are_computed(clock: Clock, counts: tuple[int, ...]) -> None:
    pipeline, launched = Pipeline(StepTimes.of_rate(1000.0)), StepInFlight()
    assert not pipeline.is_full(False)
    pipeline.put(step_of(*counts), launched.launch)
    full_for = -clock.now
    while pipeline.is_full(False):
        pass
    full_for += clock.now
    assert 0.15 < full_for < 0.2
    pipeline.put(step_of(200), StepInFlight().launch)
    assert not pipeline.is_full(False)
    pipeline.read()
    # The second began when the first was over.
    assert pipeline.is_full(False)


def test_an_idle_device_begins_while_a_step_is_launched(clock: Clock) -> None:
    pipeline = Pipeline(StepTimes.of_rate(1000.0))

    def launch(plan: StepPlan) -> StepInFlight:
        clock.now += 0.05
        return StepInFlight()

    begun = clock.now
    pipeline.put(step_of(200), launch)
    while pipeline.is_full(False):
        pass
    assert 0.12 < clock.now - begun < 0.15


def test_after_long_launches_the_next_one_begins_earlier(clock: Clock) -> None:
    pipeline, full_for = Pipeline(StepTimes.of_rate(1000.0)), []
    for launch_s in (0.1, *[0.0] * 9):
        step = StepInFlight()
        step.over = True

        def launch(plan: StepPlan) -> StepInFlight:
            clock.now += launch_s  # noqa: B023
            return step  # noqa: B023

        pipeline.put(step_of(200), launch)
        step.over = False
        begun = clock.now - launch_s
        while pipeline.is_full(False):
            pass
        full_for.append(clock.now - begun)
        pipeline.read()
    assert full_for == pytest.approx([0.09] * 8 + [0.178] * 2, abs=0.02)


def test_what_was_predicted_too_long_ends_when_it_ends(clock: Clock) -> None:
    pipeline, launched = Pipeline(StepTimes.of_rate(1000.0)), StepInFlight()
    pipeline.put(step_of(200), launched.launch)
    assert pipeline.is_full(False)
    launched.over = True
    assert not pipeline.is_full(False)


def decode_times(seconds: float) -> StepTimes:
    times = StepTimes()
    times.begin([(StepWork(0, 0, count, keys), seconds) for count, keys in ((1, 1), (2, 2), (1, 4))])
    return times


def test_decodes_are_launched_shortly_before_the_last_ones_end(clock: Clock) -> None:
    """As soon as a prompt waits, there is nothing more to wait for."""
    pipeline, begun = Pipeline(decode_times(0.02)), clock.now
    pipeline.put(step_of(1), StepInFlight().launch)
    while pipeline.is_full(False):
        assert not pipeline.is_full(True)
    assert clock.now - begun == pytest.approx(0.0185, abs=0.001)


def test_decodes_are_launched_earlier_after_the_device_had_to_wait(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_engine.pipeline._ON_TIME_S", 1.0)
    pipeline, full_for = Pipeline(decode_times(0.02)), []
    step = StepInFlight()
    pipeline.put(step_of(1), step.launch)
    for late in [True] * 5 + [False] * 300:
        begun = clock.now
        while pipeline.is_full(False):
            pass
        full_for.append(clock.now - begun)

        def launch(plan: StepPlan) -> StepInFlight:
            step.over = late  # noqa: B023
            return StepInFlight()

        pipeline.put(step_of(1), launch)
        clock.now = begun + 0.02
        pipeline.read()
        step = pipeline.oldest[1]
    assert full_for[:6] == pytest.approx([0.0183, 0.0178, 0.0168, 0.0148, 0.0108, 0.0108], abs=0.0006)
    assert full_for[-1] == pytest.approx(0.0183, abs=0.0006)


def test_the_device_need_not_wait_for_a_step_that_never_came(clock: Clock) -> None:
    """All sequences may have been aborted in the meantime."""
    pipeline, step = Pipeline(decode_times(0.02)), StepInFlight()
    pipeline.put(step_of(1), step.launch)
    assert pipeline.is_full(False)
    pipeline.read()
    pipeline.put(step_of(1), StepInFlight().launch)
    assert pipeline.is_full(False)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 200), (1000.0, 1)], ids=["rate unknown", "decodes"])
def test_what_cannot_be_foreseen_is_not_waited_for(clock: Clock, rate: float, count: int) -> None:
    pipeline = Pipeline(StepTimes.of_rate(rate) if rate else StepTimes())
    pipeline.put(step_of(count), StepInFlight().launch)
    assert not pipeline.is_full(False)


def test_the_rate_follows_what_long_steps_take(clock: Clock) -> None:
    """Two kinds of steps do not count: those before which the device was idle, since their time includes the launch,
    and those whose end was not observed."""
    times = StepTimes.of_rate(10_000.0)
    pipeline, seen = Pipeline(times), []
    steps = [(1000, StepInFlight()) for _ in range(6)]
    for count, launched in steps:
        pipeline.put(step_of(count), launched.launch)
    for index, (_, launched) in enumerate(steps):
        clock.now += 0.05
        launched.over = index == 3
        if index == 3:
            clock.now += 0.01
        pipeline.read()
        seen.append(sum(times.ratios["prompts"].counts))
    # The fourth step had ended when it was first polled, so that neither its time nor that of the fifth is known.
    assert seen == [0, 1, 2, 2, 2, 3]
    # Steps of 1,000 tokens take 0.05 s and not 0.1.
    assert times.ratios["prompts"].total == pytest.approx(3 * 0.5, rel=0.05)
    for _ in range(40):
        times.observe(StepWork(1000, 500_500, 0, 0), 0.1, 0.05)
    assert times.predict(StepWork(1000, 500_500, 0, 0)) == pytest.approx(0.05, rel=0.2)


class SlowRunner(LedgerRunner):
    """A runner whose steps take time by the prefill rate, one after another."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.__dict__ = engine.runner.__dict__
        self.clock = clock
        self.free_at = 0.0

    def launch(self, plan: StepPlan) -> LedgerStep:
        ends = self.free_at = max(self.free_at, self.clock.now) + plan.num_tokens / 250.0
        launched = super().launch(plan)
        launched.done = lambda: self.clock() >= ends  # type: ignore[method-assign]
        return launched


def test_who_comes_during_a_step_is_in_the_next(clock: Clock, tmp_path: Path) -> None:
    engine = make_ledger_engine(
        tmp_path, 1, block_size=4, num_blocks=64, max_num_batched_tokens=50, max_num_seqs=4, max_model_len=200
    )
    engine.runner = SlowRunner(engine, clock)
    first_tokens: dict[int, float] = {}
    late = [(1, 100.05), (2, 100.25)]  # steps of 50 tokens take 0.2 s

    def on_wait() -> None:
        while late and clock() >= late[0][1]:
            engine.add(make_request(late.pop(0)[0], [1] * 10, 1))

    engine.add(make_request(0, [0] * 150, 1))
    while engine.has_work:
        for delta in engine.step(on_wait).deltas:
            first_tokens[delta.id] = clock.now
    assert first_tokens[1] == pytest.approx(100.4, abs=0.01)
    assert first_tokens[2] == pytest.approx(100.6, abs=0.01)
    assert first_tokens[0] == pytest.approx(100.6 + 20 / 250, abs=0.01)
