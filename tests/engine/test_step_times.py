"""Predicted times of steps: the law behind them is found, followed and used for the size of chunks."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.executor import WithoutLayers
from baton_engine.measured_steps import measured_steps, sized_steps
from baton_engine.results import Choice, Results
from baton_engine.step import Step
from baton_engine.step_budget import StepBudget
from baton_engine.step_plan import StepPlan
from baton_engine.step_sizes import StepSizes
from baton_engine.step_times import StepTimes, StepWork, prompt_work

from .harness import make_request

Law = Callable[[StepWork], float]


def h200(work: StepWork) -> float:
    """About an 8B model on an H200, in seconds."""
    if work.prompt_tokens:
        prompts = 23e-6 * work.prompt_tokens + 1.1e-9 * work.pairs
        return 4e-3 + prompts + 20e-6 * work.decodes + 30e-9 * work.keys
    return 3.6e-3 + 20e-6 * work.decodes + 31e-9 * work.keys


def slower(work: StepWork) -> float:
    return 1.4 * h200(work)


def bound_by_weights(work: StepWork) -> float:
    """As h200, where reading the weights takes longer than computing the first tokens."""
    if not work.prompt_tokens:
        return h200(work)
    tokens = work.prompt_tokens + work.decodes
    return 1e-3 + max(4e-3, 23e-6 * tokens) + 1.1e-9 * work.pairs + 30e-9 * work.keys


def no_attention(work: StepWork) -> float:
    return 5e-3 + 40e-6 * work.prompt_tokens + 30e-6 * work.decodes


def samples(law: Law, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng, config = random.Random(3), EngineConfig(model="").on("cuda")
    plans = measured_steps(config, 131_072, 1, num_blocks=5_000)
    works = [StepWork.of(plan) for plan in plans]
    return [(work, law(work) * (1 + rng.uniform(-noise, noise))) for work in works]


def works(seed: int, count: int) -> list[StepWork]:
    """Return steps as they occur in service."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        plan = StepPlan()
        for row in range(rng.randint(1, 200)):
            plan.put(row, 1, rng.randint(100, 6_000), 1)
        if rng.random() < 0.4:
            size = rng.randint(2, 3_000)
            plan.put(300, size, size + rng.randint(0, 100_000), 1)
        found.append(StepWork.of(plan))
    return found


def worst_error(times: StepTimes, law: Law, seed: int) -> float:
    return max(abs(times.predict(work) / law(work) - 1) for work in works(seed, 300))


@pytest.mark.parametrize("law", [h200, no_attention])
def test_a_law_is_found_at_start(law: Law) -> None:
    times = StepTimes()
    times.begin(samples(law))
    assert worst_error(times, law, seed=1) < 0.02
    noisy = StepTimes()
    noisy.begin(samples(law, noise=0.05))
    for work, seconds in samples(law):
        assert noisy.predict(work) == pytest.approx(seconds, rel=0.12)


def test_short_steps_do_not_make_tokens_of_long_ones_cheap() -> None:
    times = StepTimes()
    times.begin(samples(bound_by_weights))
    assert times.token_s == pytest.approx(23e-6, rel=0.03)
    short = [StepWork(size, size * 500, 30, 30_000) for size in (20, 60, 100)]
    for work in (short + works(11, 12)) * 60:
        times.observe(work, times.predict(work), bound_by_weights(work))
    assert times.token_s == pytest.approx(23e-6, rel=0.05)


def test_a_law_is_followed_while_it_changes_and_outliers_do_not_matter() -> None:
    times, rng = StepTimes(), random.Random(5)
    times.begin(samples(h200))
    for law in (h200, slower, h200):
        for work in works(rng.randrange(1_000), 600):
            seconds = law(work) * rng.uniform(0.97, 1.03)
            if rng.random() < 0.03:
                seconds *= rng.choice([0.1, 20.0])
            times.observe(work, times.predict(work), seconds)
        assert worst_error(times, law, seed=2) < 0.12
    for histogram in times.ratios.values():
        assert sum(histogram.counts) > 400


def test_hours_of_decodes_do_not_make_prompts_forgotten() -> None:
    times = StepTimes()
    times.begin(samples(h200))
    for work in works(7, 4_000):
        if not work.prompt_tokens:
            times.observe(work, times.predict(work), h200(work))
    short = [StepWork(64, 64 * 33, decodes, 500 * decodes) for decodes in (4, 5, 6)]
    for _ in range(300):
        for work in short:
            times.observe(work, times.predict(work), h200(work))
    for context in (0, 30_000, 120_000):
        work = StepWork(2_000, 2_000 * (context + 1_000), 0, 0)
        assert times.predict(work) == pytest.approx(h200(work), rel=0.1)


def test_nothing_is_predicted_without_measurements() -> None:
    times = StepTimes()
    assert times.predict(StepWork(100, 5_050, 1, 40)) == times.prefill_rate == times.context_cost == times.token_s == 0
    times.observe(StepWork(100, 5_050, 1, 40), 0.0, 0.01)
    assert times.prefill_rate == 0


def test_a_prompt_has_the_work_of_its_chunks() -> None:
    whole = prompt_work(5e-5, 0, 100_000)
    assert whole == pytest.approx(sum(prompt_work(5e-5, first, 500) for first in range(0, 100_000, 500)))
    assert prompt_work(0.0, 70_000, 300) == 300


@pytest.mark.parametrize("context_cost", [0.0, 1e-6, 5e-5, 0.01])
@pytest.mark.parametrize("first", [0, 1_000, 131_072])
def test_a_chunk_takes_all_of_the_budget_and_no_more(context_cost: float, first: int) -> None:
    budget = StepBudget(100_000, StepSizes())
    budget.limit_prompts(1_200, context_cost)
    step = Step.decode([])
    room = budget.room(step, first)
    assert room == 1 or prompt_work(context_cost, first, room) <= 1_200 + 1e-6
    assert prompt_work(context_cost, first, room + 1) > 1_200 - 1e-6
    budget.take(first, room)
    assert budget.room(step, first) == 0


@pytest.mark.parametrize(
    ("others", "missing", "chunk"),
    [
        (0, 1_200, 1_200),
        (0, 1_275, 1_275),  # a rest of 75 tokens is not worth a step
        (0, 1_276, 1_152),
        (27, 4_000, 1_253),  # 27 and 1,253 are ten tiles
        (90, 4_000, 1_190),
        (800, 4_000, 1_248),
        (1_000, 4_000, 1_048),
        (1_000, 1_050, 1_048),  # a step has at most 2,048 tokens
        (1_600, 4_000, 448),
    ],
)
def test_a_prompt_is_cut_where_tiles_end(others: int, missing: int, chunk: int) -> None:
    budget = StepBudget(2_048, StepSizes())
    budget.limit_prompts(1_200, 0.0)
    step = Step.decode([])
    step.plan.num_tokens = others
    assert budget.chunk(step, 500, missing) == chunk


# Milliseconds of steps in which a GPU is well used up to 1,024, 1,280 and 2,048 tokens.
STAIRS = {
    512: 11.5,
    640: 14.4,
    768: 17.3,
    896: 19.0,
    1024: 19.9,
    1152: 26.6,
    1280: 26.3,
    1408: 30.4,
    2048: 41.4,
    2176: 48,
}


@pytest.mark.parametrize(
    ("tokens", "best"), [(1_200, 1_024), (1_300, 1_280), (2_200, 2_048), (400, None), (3_000, None)]
)
def test_a_size_near_is_used_well(tokens: int, best: int | None) -> None:
    assert StepSizes(STAIRS).best_near(tokens) == best


@pytest.mark.parametrize(
    ("tokens", "filled"),
    [
        (512, 512),
        (1_000, 1_024),
        (1_024, 1_024),
        (1_025, 1_280),  # 255 tokens for nothing
        (1_281, 1_408),  # as long as the next size
        (2_100, 2_176),
        (2_177, 2_177),  # not measured
        (300, 300),
    ],
)
def test_a_step_is_filled_where_that_costs_little(tokens: int, filled: int) -> None:
    assert StepSizes(STAIRS).filled(tokens) == filled
    assert StepSizes().filled(tokens) == tokens


def test_a_chunk_ends_at_a_size_that_is_used_well() -> None:
    step = Step.decode([])
    budget = StepBudget(8_192, StepSizes(STAIRS))
    budget.limit_prompts(1_250, 0.0)
    step.plan.num_tokens = 30
    assert [budget.chunk(step, 0, missing) for missing in (1_328, 1_329, 4_000)] == [1_328, 1_250, 1_250]
    step.plan.num_tokens = 60
    assert budget.chunk(step, 0, 4_000) == 1_220


def test_steps_of_all_sizes_are_measured() -> None:
    def sizes(config: EngineConfig, longest: int) -> list[int]:
        plans = sized_steps(config, longest, 1, num_blocks=500)
        assert all(plan.decodes == 1 and max(plan.ends) <= min(longest, 1_024) for plan in plans)
        return [plan.num_tokens for plan in plans]

    assert sizes(EngineConfig(model="").on("cuda"), 131_072) == list(range(512, 4_097, 128))
    small = EngineConfig(model="", max_num_batched_tokens=1_000, max_num_seqs=8).on("cuda")
    assert sizes(small, 200) == [512, 640, 768, 896]
    assert sizes(small, 100) == [512, 640]  # at most eight sequences


def test_short_chunks_are_not_rounded() -> None:
    budget = StepBudget(2_048, StepSizes())
    budget.limit_prompts(100, 0.0)
    assert [budget.chunk(Step.decode([]), 0, missing) for missing in (90, 106, 107, 4_000)] == [90, 106, 100, 100]


class Cache:
    """A cache that holds nothing."""

    layout = KvLayout(1, (Plane("key", 1, 1, "float32"),))
    block_bytes = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks


class DeviceStep(WithoutLayers):
    """A step that ends at a time of the device's clock."""

    def __init__(self, device: "Device", ends: float, results: Results) -> None:
        self._device, self._ends, self._results = device, ends, results

    def draw_masked(self, masks: np.ndarray) -> None: ...

    def done(self) -> bool:
        return self._device.now >= self._ends

    def wait(self) -> Results:
        self._device.now = max(self._device.now, self._ends)
        return self._results


class Device:
    """A runner that computes nothing. Its steps take time by a law, on a clock that only they advance."""

    depth, stages, compilations, threads = 1, 1, 0, None

    def __init__(self, config: EngineConfig, law: Law, times: StepTimes) -> None:
        assert config.num_blocks is not None
        self.cache = Cache(config.num_blocks)
        self.max_model_len = config.max_model_len
        self.law, self.times = law, times
        self.now = self.free_at = 0.0
        self.steps: list[tuple[StepWork, float]] = []

    def launch(self, plan: StepPlan) -> DeviceStep:
        work = StepWork.of(plan)
        self.steps.append((work, self.law(work)))
        self.free_at = max(self.free_at, self.now) + self.law(work)
        return DeviceStep(self, self.free_at, Results([[Choice(5, None)] * draws for draws in plan.draws]))

    def fence(self) -> None:
        return None


@pytest.mark.parametrize("predicted", [h200, slower])
def test_chunks_of_a_long_prompt_stay_within_their_time(
    llama: Path, monkeypatch: pytest.MonkeyPatch, predicted: Law
) -> None:
    """Beside a decode, a prompt of 128k tokens is computed in chunks of twice --chunk-ms, also when the law at start
    was wrong: then the predictions follow."""
    length, times = 131_000, StepTimes()
    times.begin(samples(predicted))
    config = EngineConfig(
        model=str(llama), device="cpu", block_size=64, num_blocks=2_100, max_num_batched_tokens=8_192, max_num_seqs=4,
        max_model_len=131_072, enable_prefix_caching=False,
    )  # fmt: skip
    device = Device(config, h200, times)
    monkeypatch.setattr("baton_engine.engine.make_runner", lambda *_: device)
    monkeypatch.setattr("baton_engine.pipeline.time.monotonic", lambda: device.now)
    engine = Engine(config)
    engine.add(make_request(0, [1] * 10, 5_000))
    engine.step()
    engine.add(make_request(1, [1] * length, 1))
    while not any(delta.id == 1 for delta in engine.step().deltas):
        pass
    beside = h200(StepWork(2, 2, 1, 500)) - h200(StepWork(2, 2, 0, 0))
    chunks = [(work, seconds - beside) for work, seconds in device.steps[1:] if work.prompt_tokens]
    assert sum(work.prompt_tokens for work, _ in chunks) == length
    bound = 2 * config.chunk_ms / 1e3
    spent = [seconds for _, seconds in chunks[20:-1]]
    assert max(spent) < 1.1 * bound
    assert min(spent) > 0.7 * bound
    assert chunks[0][0].prompt_tokens > 3 * chunks[-2][0].prompt_tokens
    ratios = times.ratios["prompts"]
    assert ratios.total / sum(ratios.counts) == pytest.approx(1, abs=0.1)
