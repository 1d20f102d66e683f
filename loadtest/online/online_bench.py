"""Baton's server beside vLLM's on one device: the same shape, the same arrivals, the same settings, one run.

Both answer the OpenAI completions API over loopback, with random weights, prefix caches off and a temperature of 0.6.
A shape is a folder with a config.json; weights and tokenizer are made for it. "lone": one request at a time.
"capacity": many at once, and how many a second are answered. "medium", "heavy": arrivals at random (Poisson), whatever
the server does. TTFT counts from the moment a request was due; ITL is the time between two tokens of a stream, where
tokens that come together share it; TPOT is its mean in a request. Lengths of answers are checked; a request that fails
counts as failed, and so does the run. A cell shows the median of --repeats runs, and in parentheses the least and the
largest.
"""

import argparse
import asyncio
import fnmatch
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_bench.answer import Answer
from baton_engine.models.registry import load_model_config
from loadtest.common.bench_table import aligned, spread
from loadtest.common.client import Load, drive
from loadtest.common.job import Json
from loadtest.common.random_model import write_random_model
from loadtest.common.servers import HOST, KINDS, Server, setting

SHORT, LONG = (1024, 128), (4000, 200)
PERCENTILES = (50, 90, 99)


def make_loads(scale: float, seconds: float, pace: float, patterns: str, long: bool = False) -> list[Load]:
    """Return the loads whose keys match one of the comma-separated shell patterns.

    scale: of lengths and numbers of requests, pace: of the rates of arrivals. long: also long prompts one at a time,
    and prompts of uneven lengths.
    """
    loads = [_lone("lone-tiny", (16, 16), scale, 21)]
    for name, (inputs, outputs), burst, rates in (
        ("short", SHORT, 512, {"medium": 15.8, "heavy": 26.8}),
        ("long", LONG, 140, {"medium": 3.0, "heavy": 5.9}),
    ):
        inputs, outputs = _scaled(inputs, scale), _scaled(outputs, scale)
        title = f"{inputs} in / {outputs} out"
        loads.append(_lone(f"lone-{name}", (inputs, 16), scale, 11))
        count = _scaled(burst, scale)
        loads.append(Load(f"capacity-{name}", f"{title}, capacity", inputs, outputs, count, concurrency=count))
        for tag, rate in rates.items():
            rate *= pace
            count = max(round(rate * seconds), 1)
            loads.append(Load(f"{tag}-{name}", f"{title}, {rate:.3g}/s", inputs, outputs, count, rate))
    if long:
        for name, length, count in (("16k", 16_384, 7), ("32k", 32_768, 5), ("128k", 130_048, 3)):
            loads.append(_lone(f"lone-{name}", (length, 16), scale, count))
        inputs, least, outputs = (_scaled(length, scale) for length in (16_384, 128, 128))
        rate = 1.5 * pace
        name = f"{least}-{inputs} in / {outputs} out, {rate:.3g}/s"
        loads.append(Load("uneven", name, inputs, outputs, max(round(rate * seconds), 1), rate, least=least))
    return [load for load in loads if any(fnmatch.fnmatchcase(load.key, pattern) for pattern in patterns.split(","))]


def _lone(key: str, lengths: tuple[int, int], scale: float, count: int) -> Load:
    inputs, outputs = (_scaled(length, scale) for length in lengths)
    return Load(key, f"{inputs} in / {outputs} out, lone", inputs, outputs, _scaled(count, scale))


def _scaled(count: int, scale: float) -> int:
    return max(round(count * scale), 2)


def summary(answers: list[Answer]) -> Json:
    """Return the figures of a load: times in ms by percentile, and requests a second from the first to the last."""
    good = [answer for answer in answers if not answer.error]
    result: Json = {"requests": len(answers), "failed": len(answers) - len(good)}
    if result["failed"]:
        result["error"] = next(f"{answer.error}: {answer.detail}" for answer in answers if answer.error)
    if not good:
        return result
    span = max(answer.end for answer in good) - min(answer.due for answer in answers)
    return result | {
        "req_s": len(good) / span,
        "out_tok_s": sum(answer.tokens for answer in good) / span,
        "ttft_ms": _percentiles([answer.ttft for answer in good if answer.ttft is not None]),
        "itl_ms": _percentiles([gap for answer in good for gap in answer.gaps]),
        "tpot_ms": _percentiles([answer.tpot for answer in good if answer.tpot is not None]),
    }


def joined(runs: list[Json]) -> Json:
    """Return the median of each figure of several runs of a load, with the runs themselves."""
    first = runs[0]
    result: Json = {"runs": runs}
    for key, value in first.items():
        values = [run[key] for run in runs if key in run]
        if isinstance(value, dict):
            result[key] = {name: statistics.median(each[name] for each in values) for name in value}
        else:
            result[key] = statistics.median(values) if isinstance(value, float) else value
    result["requests"], result["failed"] = (sum(run[key] for run in runs) for key in ("requests", "failed"))
    errors = [run["error"] for run in runs if "error" in run]
    return result | ({"error": errors[0]} if errors else {})


def _percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values) or [0.0]
    return {f"p{p}": values[min(len(values) * p // 100, len(values) - 1)] * 1e3 for p in PERCENTILES}


def table(report: Json, loads: list[Load], names: list[str]) -> str:
    """Return a line for each figure of each load: every server's, and how many times better ours is than each other."""
    others = [name for name in names if name != "ours"] if "ours" in names else []
    lines = [["", *names, *(f"ours : {name}" for name in others)]]
    for load in loads:
        figures = [("req/s", ("req_s",))] if load.key.startswith("capacity") else _times(load)
        for title, path in figures:
            results = {name: report["servers"].get(name, {}).get(load.key, {}) for name in names}
            values = {name: _at(result, path) for name, result in results.items()}
            ratios = [_ratio(values["ours"], values[other], title) for other in others]
            runs = [[_at(run, path) for run in result.get("runs", [])] for result in results.values()]
            known = [[value for value in each if value is not None] for each in runs]
            cells = [spread(each) if each else "-" for each in known]
            lines.append([f"{load.name}, {title}", *cells, *ratios])
    return aligned(lines, 1)


def _times(load: Load) -> list[tuple[str, tuple[str, ...]]]:
    # Requests one at a time have no neighbours that could delay some of their tokens.
    shown = (("TTFT", "p50"), ("TTFT", "p99"), ("ITL", "p50"), *((("ITL", "p99"),) if load.rate else ()))
    return [(f"{what} {p} ms", (f"{what.lower()}_ms", p)) for what, p in shown]


def _at(result: Json, path: tuple[str, ...]) -> float | None:
    value: Json | float | None = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, float) else None


def _ratio(ours: float | None, other: float | None, title: str) -> str:
    if not ours or not other:
        return "-"
    return f"{ours / other if title == 'req/s' else other / ours:.2f}"


class Bench:
    """The whole run: one server after the other, each under every load."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        a = arguments
        self._loads = make_loads(a.scale, a.seconds, a.pace, a.loads, a.long)
        self._began = time.monotonic()
        self._report: Json = {"shape": arguments.shape.resolve().name, "servers": {}}

    def run(self) -> bool:
        a = self._arguments
        a.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="baton-online-") as name:
            model = a.shape
            if not any(a.shape.glob("*.safetensors")):
                model = a.weights_dir or Path(name, "model")
                self._make_model(model)
            for server in a.servers.split(","):
                self._measure(server, model, a.out.with_suffix(f".{server}.log"))
        names = a.servers.split(",")
        print(f"\n{self._report['shape']}\n\n{table(self._report, self._loads, names)}\n", flush=True)
        results = [r for loads in self._report["servers"].values() for r in loads.values() if isinstance(r, dict)]
        return bool(results) and not any(result.get("failed") or "error" in result for result in results)

    def _make_model(self, folder: Path) -> None:
        write_random_model(folder, (self._arguments.shape / "config.json").read_text(), self._arguments.seed)
        self._say("weights and tokenizer made")

    def _measure(self, name: str, model: Path, log: Path) -> None:
        a = self._arguments
        config = load_model_config(model)
        vocab = config.vocab_size
        loads = [load for load in self._loads if load.inputs + load.outputs <= config.max_position_embeddings]
        results: Json = self._report["servers"].setdefault(name, {})
        longest = max((load.inputs + load.outputs for load in loads), default=0)
        settings = {"max_model_len": max(a.max_model_len, longest), "enable_prefix_caching": False, **dict(a.settings)}
        try:
            with Server(name, model, settings, log) as server:
                self._say(f"{name}: ready after {server.seconds_to_start:.1f} s")
                # Warm-up: compilation, graph capture and allocation at first use are not part of steady operation.
                for load in make_loads(a.scale, a.seconds, a.pace, "lone-short,capacity-short"):
                    asyncio.run(drive(HOST, server.port, load, a.seed + 1000, vocab))
                for number, load in enumerate(loads):
                    runs: list[Json] = []
                    for run in range(a.repeats):
                        seed = a.seed + number + 10_000 * run
                        runs.append(summary(asyncio.run(drive(HOST, server.port, load, seed, vocab))))
                        results[load.key] = {"name": load.name, **joined(runs)}
                        self._say(f"{name}: {load.name}: {json.dumps(runs[-1])}")
                        a.out.write_text(json.dumps(self._report, indent=1))
        except RuntimeError as error:
            results["start"] = {"error": str(error)}
            self._say(f"{name}: {error}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--servers", default="ours,vllm", help="some of " + ", ".join(KINDS))
    parser.add_argument(
        "--loads",
        default="*",
        help="keys or shell patterns: lone-tiny, and lone, capacity, medium and heavy, each with -short and -long",
    )
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/online_bench.json"))
    parser.add_argument(
        "--long",
        action="store_true",
        help="also lone-16k, lone-32k, lone-128k and uneven, as far as the model has so many positions",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each load, with other prompts and arrivals")
    parser.add_argument("--seconds", type=float, default=28.0, help="duration of the arrivals at each rate")
    parser.add_argument(
        "--pace", type=float, default=1.0, help="factor for the rates, which suit an 8B model on an H200"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor for lengths and numbers of requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--set", dest="settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag of both servers, such as gpu_memory_utilization=0.9",
    )  # fmt: skip
    parser.add_argument("--weights-dir", type=Path, help="folder that keeps random weights for the next run")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.servers.split(",") if name not in KINDS]
    if unknown:
        parser.error(f"--servers: {unknown[0]!r} is none of {', '.join(KINDS)}")
    missing = [
        name for name in arguments.servers.split(",") if name != "ours" and importlib.util.find_spec(name) is None
    ]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
        arguments.servers = ",".join(name for name in arguments.servers.split(",") if name not in missing)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    good = Bench(arguments).run()
    print(f"written to {arguments.out}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
