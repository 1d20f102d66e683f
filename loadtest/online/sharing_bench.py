"""What the threads of two engines on the same cores cost: TTFT of a local Baton, on an idle machine and a busy one.

Usage: sharing_bench.py [MODEL_DIR] [--out FILE]. `baton up` with a prefill and a decode pod, by default of the demo
model, in two ways that take turns: `cores` gives each engine as many threads as there are cores, which spin while they
wait, and `chosen` leaves the choice to Baton. Requests of random prompts arrive at random (Poisson) at several rates,
the same for both ways. Then the same beside a process that keeps one core busy. TTFT counts from the moment a request
was due; CPU time is that of all processes of the server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import psutil

from baton_cli.ports import free_loopback_ports
from baton_demo import MODEL_DIR
from baton_engine.models.registry import load_model_config
from loadtest.common.bench_table import aligned, figure
from loadtest.common.busy_process import busy_process
from loadtest.common.client import Load, drive
from loadtest.common.job import Json
from loadtest.common.servers import HOST, KINDS, Running
from loadtest.online.isolation_bench import percentiles, ttfts

CORES = len(os.sched_getaffinity(0))
# An engine that is configured to own the cores keeps libgomp's default, which is to spin.
WAYS = {"cores": {"BATON_NUM_THREADS": str(CORES), "BATON_ENGINES_SHARING_CPU": "1"}, "chosen": {}}
BESIDE = ("idle", "busy")
_SET_HERE = ("BATON_NUM_THREADS", "BATON_ENGINES_SHARING_CPU", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
_WARM_UP = 4  # requests


def start(model: Path, way: str, log: Path) -> Running:
    kind = KINDS["ours-pd"]
    [port] = free_loopback_ports(1)
    command = [*kind.command, "--model", str(model), "--served-model-name", "m", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name not in _SET_HERE}
    return Running(command, port, kind.ready, log, environment | WAYS[way])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its descendants that still run."""
    top = psutil.Process(pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def measure(server: Running, arguments: argparse.Namespace, seed: int) -> list[Json]:
    """Return the figures of each rate, in ms; the requests are the same for the same seed."""
    a, vocab = arguments, load_model_config(arguments.model).vocab_size
    await drive(HOST, server.port, Load("warm-up", "", a.inputs, a.outputs, _WARM_UP), seed, vocab)
    rows = []
    for number, rate in enumerate(a.rates):
        load = Load("rate", "", a.inputs, a.outputs, max(round(rate * a.seconds), 2), rate)
        before = cpu_seconds(server.pid)
        answers = await drive(HOST, server.port, load, seed + 1 + number, vocab)
        cpu = cpu_seconds(server.pid) - before
        failed = sum(bool(answer.error) for answer in answers)
        rows.append({"rate": rate, "ttfts": ttfts(answers), "cpu_s": cpu, "requests": load.count, "failed": failed})
    return rows


def run(arguments: argparse.Namespace) -> list[Json]:
    rows: list[Json] = []
    for beside in arguments.beside:
        for number in range(arguments.rounds):
            for way in WAYS:
                with contextlib.ExitStack() as stack:
                    server = stack.enter_context(start(arguments.model, way, arguments.out.with_suffix(f".{way}.log")))
                    if beside == "busy":
                        stack.enter_context(busy_process())
                    found = asyncio.run(measure(server, arguments, arguments.seed + 1_000 * number))
                rows += [{"beside": beside, "way": way, "round": number, **row} for row in found]
                print(f"{beside}, {way}, round {number + 1} of {arguments.rounds}: measured", flush=True)
    return rows


def summary(rows: list[Json]) -> list[Json]:
    """Return one row for each place, rate and way: percentiles over the requests of all rounds."""
    result = []
    for beside, rate, way in dict.fromkeys((r["beside"], r["rate"], r["way"]) for r in rows):
        own = [row for row in rows if (row["beside"], row["rate"], row["way"]) == (beside, rate, way)]
        requests = sum(row["requests"] for row in own)
        result.append(
            {
                **{"beside": beside, "rate": rate, "way": way},
                **percentiles([value for row in own for value in row["ttfts"]]),
                "cpu_ms": sum(row["cpu_s"] for row in own) / requests * 1e3,
                "failed": sum(row["failed"] for row in own),
            }
        )
    return sorted(result, key=lambda row: (BESIDE.index(row["beside"]), row["rate"], row["way"] == "chosen"))


def table(rows: list[Json]) -> str:
    lines = [["machine", "req/s", "threads", "TTFT p50 ms", "p99 ms", "CPU ms a request", "failed"]]
    for row in rows:
        times = map(figure, (row["p50"], row["p99"], row["cpu_ms"]))
        lines.append([row["beside"], f"{row['rate']:g}", row["way"], *times, str(row["failed"])])
    return aligned(lines, 3)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", nargs="?", default=MODEL_DIR)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("loadtest/out/sharing_bench.json"),
        help="report file; the servers' logs are written beside it",
    )
    parser.add_argument("--rates", type=numbers, default=[2, 4, 8, 16], help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the arrivals at each rate")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=32, help="tokens of an answer")
    parser.add_argument(
        "--beside", choices=BESIDE, action="append", help="condition to measure; both without this option"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.beside = arguments.beside or list(BESIDE)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = run(arguments)
    summed = summary(rows)
    print(f"\n{CORES} cores\n\n{table(summed)}")
    arguments.out.write_text(json.dumps({"cores": CORES, "summary": summed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
