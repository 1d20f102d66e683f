"""What the engine's own Python costs per step, with a runner that computes nothing.

On a GPU the next step is prepared while the last one runs. As long as these figures are below the time of a step on the
device, they cost nothing. Above it, they are the time of a step.
"""

import argparse
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.executor import Done
from baton_engine.results import Choice, Results
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request
from baton_engine.step_plan import StepPlan
from baton_engine.step_times import StepTimes
from baton_worker.channel import EngineEnd
from baton_worker.engine_process import EngineLoop
from baton_worker.messages import Output
from loadtest.common.bench_table import aligned

_VOCAB_SIZE = 151_936
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
}
_PROMPT_TOKENS = 1024


class _Cache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.data = torch.empty(1, 1, num_blocks, block_size, 1, 1)
        self.layout = KvLayout(1, (Plane("key", 1, 1, "float32"),))
        self.num_blocks = num_blocks
        self.block_bytes = block_size


class _Runner:
    """Returns the same token in every step, one step late."""

    depth = 1
    compilations, stages = 0, 1

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_blocks is not None
        self.cache = _Cache(config.num_blocks, config.block_size)
        self.max_model_len = 40_960
        self._choices = [Choice(1000, None)]
        self.times = StepTimes()

    def launch(self, plan: StepPlan) -> Done:
        return Done(Results([self._choices if draws else [] for draws in plan.draws]))


class _Clock:
    """Seconds spent in calls, by name, for one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        setattr(owner, method, timed)


def make_engine(folder: Path, **settings: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps(_MODEL))
    with patch("baton_engine.engine.make_runner", lambda config, *_: _Runner(config)):
        return Engine(EngineConfig(model=str(folder), num_blocks=80_000, max_num_batched_tokens=8192, **settings))


def make_request(id: int, prompt_tokens: int, max_tokens: int) -> Request:
    prompt = [(id * 7919 + index * 31) % _VOCAB_SIZE for index in range(prompt_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.6, seed=id, eos_token_ids=[151_645, 151_643])
    return Request(id=id, prompt=prompt, sampling=sampling)


def bench(sequences: int, steps: int, arrivals: int, caching: bool) -> dict[str, float]:
    """Return medians in ms per step, the runner's own time left out.

    arrivals: prompts of 1,024 tokens that come with each step and get one token each; else all is decoding.
    """
    with tempfile.TemporaryDirectory() as name:
        engine = make_engine(Path(name), max_num_seqs=sequences + 32, enable_prefix_caching=caching)
    ours, theirs = socket.socketpair()
    # Another process reads, so that sending costs as much as in production.
    with subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL) as reader:
        theirs.close()
        loop = object.__new__(EngineLoop)
        loop.__dict__.update(
            _channel=EngineEnd(ours),
            _engine=engine,
            _mover=SimpleNamespace(output=Output()),
            _load_due=0.0,
            _last_load=b"",
        )
        clock = _Clock()
        clock.wrap(engine.scheduler, "schedule", "schedule")
        clock.wrap(engine.runner, "launch", "runner")
        next_id = sequences
        for id in range(sequences):
            engine.add(make_request(id, 512, 30_000))
        while engine.scheduler.waiting or any(s.output_len < 2 for s in engine.scheduler.running):
            engine.step()
        gc.collect()
        gc.freeze()
        rows: list[dict[str, float]] = []
        for _ in range(steps):
            clock.seconds = {}
            requests = [make_request(next_id + index, _PROMPT_TOKENS, 1) for index in range(arrivals)]
            next_id += arrivals
            start = time.perf_counter()
            for request in requests:
                assert engine.request_error(request) is None
                engine.add(request)
            added = time.perf_counter()
            result = engine.step()
            stepped = time.perf_counter()
            loop._mover.output.deltas += result.deltas
            loop._send()
            end = time.perf_counter()
            runner, schedule = clock.seconds.get("runner", 0.0), clock.seconds["schedule"]
            rows.append(
                {
                    "add": added - start,
                    "schedule": schedule,
                    "collect": stepped - added - schedule - runner,
                    "send": end - stepped,
                    "total": end - start - runner,
                }
            )
        ours.close()
        reader.wait()
    gc.unfreeze()
    return {part: statistics.median(row[part] for row in rows) * 1e3 for part in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    parts = ("add", "schedule", "collect", "send", "total")
    lines = [["ms per step", *parts]]
    cases = [(count, 0, True) for count in (1, 32, 256)] + [(256, 2, caching) for caching in (True, False)]
    for sequences, arrivals, caching in cases:
        name = f"{sequences} decoding"
        if arrivals:
            name += f", {arrivals} new prompts, caching {'on' if caching else 'off'}"
        row = bench(sequences, arguments.steps, arrivals, caching)
        lines.append([name, *(f"{row[part]:.3f}" for part in parts)])
    print(aligned(lines, 1))


if __name__ == "__main__":
    main()
