"""Simulates many requests that arrive at once at an engine whose KV cache cannot hold them all at their full lengths.

    python loadtest/engine/admission_sim.py --device 70b-tp2
    python loadtest/engine/admission_sim.py --device 70b-tp2 --limit 4000 --median 600

It compares two rules of admission. With "growth", which is the engine's, a request waits for the blocks into which
running answers are expected to grow. With "fixed margin", which is what the engine did before, it only leaves them the
next block of each. The scheduler is the engine's; step times come from a formula (sim_engine.py).

A request that is preempted is computed again, which counts as prompt tokens. TTFT is in seconds of the simulated clock.
The host's times are CPU time of the scheduler for each step on this machine, and the only figures that differ between
two runs with the same options.
"""

import argparse
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.scheduler import Scheduler
from baton_engine.sequence import Sequence
from baton_engine.step import Step
from baton_engine.step_times import StepWork
from loadtest.common.bench_table import aligned, figure
from loadtest.common.sim_engine import BLOCK_SIZE, Device, EnginePod, Job
from loadtest.common.sim_pod import Clock

# Both shapes in FP8 with KV in FP8. The seconds are fitted to rows of RESULTS.md: the rate of 64 prompts of 2,048
# tokens, and decode steps of 128 and 256 sequences. Steps with fewer than 64 decodes take longer than the formula says.
# The tokens of KV were measured for 8b and estimated for 70b-tp2.
DEVICES = {
    "70b-tp2": Device(  # Llama-3.1-70B, two ranks on NVIDIA H200
        prompt_step_s=6e-3,
        token_s=64e-6,
        pair_s=4.8e-9,
        decode_step_s=7.4e-3,
        decode_s=64e-6,
        key_s=81_920 / 4e12,
        token_bytes=163_840,
        num_blocks=1_060_000 // BLOCK_SIZE,
        most_tokens=16_384,
        most_sequences=1024,
    ),
    "8b": Device(  # Llama-3.1-8B on one NVIDIA H200
        token_s=12e-6,
        decode_step_s=2.1e-3,
        decode_s=14e-6,
        key_s=65_536 / 4e12,
        token_bytes=65_536,
        num_blocks=1_750_000 // BLOCK_SIZE,
        most_tokens=16_384,
        most_sequences=1024,
    ),
}


class MeasuredScheduler(Scheduler):
    """The engine's scheduler, which notes the prompt tokens of its steps and the CPU time for which it plans each."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.prompt_tokens = 0
        self.host_s: list[float] = []

    def schedule(self) -> Step:
        began = time.thread_time()
        step = super().schedule()
        self.host_s.append(time.thread_time() - began)
        self.prompt_tokens += StepWork.of(step.plan).prompt_tokens
        return step


class FixedMargin(MeasuredScheduler):
    """Admits a sequence as soon as its blocks are free, and one more for each running sequence."""

    def _take_blocks(self, sequence: Sequence, claimed: int = 0) -> bool:
        if not self.allocator.take(sequence, self._admitted.margin + claimed):
            return False
        sequence.computed = sequence.cached
        return True


RULES: dict[str, type[MeasuredScheduler]] = {"fixed margin": FixedMargin, "growth": MeasuredScheduler}


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once. prompt: tokens of each. limit: the most tokens of an answer.

    median, sigma: of the log-normal distribution of the answers' lengths, of which the engine knows nothing at first.
    median 0 = all answers have `limit` tokens, and the engine knows it.
    """

    requests: int
    prompt: int
    limit: int
    median: int = 0
    sigma: float = 0.6

    def outputs(self, seed: int) -> list[int]:
        """Return the length of each answer. seed: of the log-normal lengths."""
        if not self.median:
            return [self.limit] * self.requests
        rng, mean = random.Random(seed), math.log(self.median)
        lengths = [round(rng.lognormvariate(mean, self.sigma)) for _ in range(self.requests)]
        return [min(max(length, 1), self.limit) for length in lengths]


@dataclass(frozen=True)
class Outcome:
    """What a rule of admission does with a load.

    tokens: for each request, when its tokens came, in seconds. prompt_tokens: that were computed. host_s: CPU time of
    the scheduler for each step.
    """

    tokens: list[list[float]]
    preemptions: int
    prompt_tokens: int
    host_s: list[float]

    @property
    def rate(self) -> float:
        """The tokens of all answers per second, until the last one has ended."""
        return sum(map(len, self.tokens)) / max(times[-1] for times in self.tokens)

    def ttft(self, share: float) -> float:
        return _percentile([times[0] for times in self.tokens], share)


def replay(load: Load, device: Device, rule: type[MeasuredScheduler], chunk_ms: float = 0, seed: int = 0) -> Outcome:
    """Let a simulated engine answer all requests of a load."""
    clock = Clock()
    pod = EnginePod(clock, device, chunk_ms, make_scheduler=rule)
    outputs = load.outputs(seed)
    tokens: list[list[float]] = [[] for _ in outputs]

    def note(times: list[float]) -> None:
        times.append(clock.now)

    for output, times in zip(outputs, tokens, strict=True):
        limit = load.limit if load.median else 0
        pod.prefill(Job(load.prompt, output, partial(note, times), limit=limit))
    clock.run()
    assert list(map(len, tokens)) == outputs
    scheduler = pod.scheduler
    assert isinstance(scheduler, MeasuredScheduler)
    return Outcome(tokens, scheduler.num_preemptions, scheduler.prompt_tokens, scheduler.host_s)


def cells(name: str, load: Load, outcome: Outcome) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        f"{outcome.preemptions:,}",
        f"{outcome.prompt_tokens:,} of {load.requests * load.prompt:,}",
        f"{outcome.rate:,.0f}",
        *(figure(outcome.ttft(share)) for share in (0.5, 0.99)),
        figure(1e3 * statistics.mean(outcome.host_s)),
        figure(1e3 * _percentile(outcome.host_s, 0.99)),
    ]


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _not_negative(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is negative or not finite")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="70b-tp2", help="whose step times the formula gives")
    parser.add_argument(
        "--kv-tokens", type=_count, help="of the KV cache; by default the device's, which for 70b-tp2 is an estimate"
    )
    parser.add_argument("--requests", type=_count, default=1024)
    parser.add_argument("--prompt", type=_count, default=1000, help="tokens of each prompt")
    parser.add_argument("--limit", type=_count, default=1000, help="the most tokens of an answer")
    parser.add_argument(
        "--median", type=_count, default=0, help="of log-normal lengths; without it, all are at the limit"
    )
    parser.add_argument("--sigma", type=_not_negative, default=0.6, help="of log-normal lengths")
    parser.add_argument(
        "--chunk-ms", type=_not_negative, default=0, help="as EngineConfig has it; 0 = as in engine_bench.py"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    arguments = parser.parse_args()
    device = DEVICES[arguments.device]
    if arguments.kv_tokens:
        device = replace(device, num_blocks=arguments.kv_tokens // BLOCK_SIZE)
    load = Load(arguments.requests, arguments.prompt, arguments.limit, arguments.median, arguments.sigma)
    if load.prompt + load.limit > device.num_blocks * BLOCK_SIZE:
        parser.error("--kv-tokens must be at least --prompt and --limit together, rounded up to whole blocks")
    lines = [["admission", "preempted", "prompt tokens", "out tok/s", "TTFT p50", "p99", "host ms/step", "p99"]]
    for name, rule in RULES.items():
        lines.append(cells(name, load, replay(load, device, rule, arguments.chunk_ms, arguments.seed)))
    print(aligned(lines, 1))


if __name__ == "__main__":
    main()
