"""Finds the size of a model above which one more CPU thread makes a step faster, if threads spin or if they sleep.

Usage: threads_bench.py [--out FILE]. Llamas of random weights, each wider than the one before. Each way (one thread, a
thread a core that spins, a thread a core that sleeps while it waits) runs in a process of its own, since the OpenMP
library reads its settings when it is loaded; the ways take turns. The table has the fastest round's 25th percentile of
a decode step of 1 and of 8 sequences and of the prefill of 256 tokens, and how many threads baton_engine/threads.py
chooses.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.models.registry import load_model_config
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request
from baton_engine.threads import choose_threads
from loadtest.common.bench_table import aligned, figure
from loadtest.common.busy_process import busy_process
from loadtest.common.job import Json
from loadtest.common.random_model import write_random_model

WAITING = {"spin": {}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}}
STEPS = ("decode 1", "decode 8", "prefill 256")
_PROMPT, _OUTPUT = 16, 32
_SET_HERE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def write_model(folder: Path, hidden: int) -> None:
    """Write a Llama of 6 layers; hidden: a multiple of 128."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": 6,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    write_random_model(folder, json.dumps(shape), seed=0)


class Steps:
    """An engine whose steps are timed, in ms."""

    def __init__(self, folder: Path, threads: int) -> None:
        config = EngineConfig(model=str(folder), num_threads=threads, num_blocks=512, max_num_batched_tokens=256)
        self._engine = Engine(config)
        self._ids = iter(range(1_000_000))

    def time(self, step: str, seconds: float) -> float:
        """Return the 25th percentile over so many seconds."""
        kind, _, size = step.partition(" ")
        run: Callable[[int], list[float]] = self._decode if kind == "decode" else self._prefill
        run(int(size))
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            times += run(int(size))
        return sorted(times)[len(times) // 4]

    def _decode(self, batch: int) -> list[float]:
        for _ in range(batch):
            self._add(_PROMPT, _OUTPUT)
        times = self._run()
        return times[len(times) // 4 : -len(times) // 4]  # without prefills and ends

    def _prefill(self, tokens: int) -> list[float]:
        self._add(tokens, 1)
        return [sum(self._run())]

    def _add(self, inputs: int, outputs: int) -> None:
        highest = self._engine.model.vocab_size - 1
        prompt = [random.randint(4, highest) for _ in range(inputs)]
        self._engine.add(Request(id=next(self._ids), prompt=prompt, sampling=SamplingParams(max_tokens=outputs)))

    def _run(self) -> list[float]:
        times = []
        while self._engine.has_work:
            start = time.perf_counter()
            self._engine.step()
            times.append((time.perf_counter() - start) * 1e3)
        return times


def in_own_process(folder: Path, threads: int, waiting: str, seconds: float) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name not in _SET_HERE} | WAITING[waiting]
    command = [sys.executable, __file__, "--child", str(folder), str(threads), "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bench(folder: Path, cores: int, arguments: argparse.Namespace) -> list[Json]:
    """Return a row for each way, the fastest of all rounds."""
    ways = [(1, "sleep"), *((cores, waiting) for waiting in WAITING)]
    best = {way: dict.fromkeys(STEPS, float("inf")) for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            found = in_own_process(folder, *way, arguments.seconds)
            best[way] = {step: min(best[way][step], found[step]) for step in STEPS}
    return [{"threads": count, "waiting": waiting, "ms": best[count, waiting]} for count, waiting in ways]


def lines_of(hidden: int, folder: Path, cores: int, rows: list[Json]) -> list[list[str]]:
    model, config = load_model_config(folder), EngineConfig(model=str(folder))
    millions = f"{model.layer_weights / 1e6:.1f}"
    lines = []
    for row in rows:
        chosen = choose_threads(config, model.layer_weights, cores, WAITING[row["waiting"]])
        way = f"{row['threads']}, {row['waiting']}" if row["threads"] > 1 else "1"
        choice = str(chosen.count) if row["threads"] > 1 else ""
        lines.append([str(hidden), millions, way, *map(figure, row["ms"].values()), choice])
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/threads_bench.json"))
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 384, 512, 768, 1024, 1536])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of the measurement of each kind of step")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        steps = Steps(Path(arguments.child[0]), int(arguments.child[1]))
        print(json.dumps({step: steps.time(step, arguments.seconds) for step in STEPS}))
        return
    cores = len(os.sched_getaffinity(0))
    table = [["hidden", "million weights in a layer", "threads", *(f"{step} ms" for step in STEPS), "chosen"]]
    report: Json = {"cores": cores, "busy": arguments.busy, "models": {}}
    for hidden in arguments.hidden:
        with tempfile.TemporaryDirectory(prefix="baton-threads-") as name:
            folder = Path(name)
            write_model(folder, hidden)
            if arguments.busy:
                with busy_process():
                    rows = bench(folder, cores, arguments)
            else:
                rows = bench(folder, cores, arguments)
            report["models"][hidden] = rows
            table += lines_of(hidden, folder, cores, rows)
        print(f"hidden {hidden}: measured", flush=True)
    print(f"\n{aligned(table, 3)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
