"""Baton's engine beside vLLM and Hugging Face transformers: one run, one device, the same shapes and the same requests.

A shape is a folder with a config.json. If it has no weights, random ones are written to a temporary folder for Baton,
in the format that its quantization_config names. With --weights-in-memory, they are made in memory instead; with
--ours quantization=fp8 (int8, int4), they are then quantized as they are loaded. The other engines make their own in
memory. Prompts are random token ids, each output has a fixed length, prefix caches are off, the temperature is 0.6
(transformers decodes greedily, which takes less time). Engines that are not installed are left out. Results are written
after every row.

- ms/token, of decodes: the time of a run with long outputs, minus that of a run with outputs of 8 tokens, divided by
  the difference of their lengths. Prompts have 512 tokens.
- ms, of one prompt: the time from the request to its first token.
- tok/s, of prefill: all prompt tokens, divided by the time until every request has its first token.

A run of a row without repeats is repeated until it becomes no faster, and the fastest one counts: an engine may have
compiled kernels in the others.

A cell shows the median of a row's repeats and in parentheses the least and the largest. --long adds prompts and decodes
of up to 130,048 tokens, and uneven lengths; an engine skips what does not fit into its memory or its positions.

transformers has no scheduler: it runs only the rows whose requests have equal lengths, with at most 32 tokens per
output and 16 prompts.
"""

import argparse
import contextlib
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from loadtest.common.job import Job, Json
from loadtest.common.servers import setting
from loadtest.engine.bench_report import Report
from loadtest.engine.device import Card
from loadtest.engine.engines import ENGINES
from loadtest.engine.job_rows import rows_of
from loadtest.engine.limits import Limits
from loadtest.engine.long_rows import make_long_rows
from loadtest.engine.result_tables import profile_table, table
from loadtest.engine.rows import make_rows
from loadtest.engine.task_process import run_task


class Bench:
    """The whole run. All measurements take place in child processes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._began = time.monotonic()
        self._rows = rows_of(self._job("", Path()))
        if not self._rows:
            raise SystemExit(f"--rows {arguments.rows!r} matches none of the rows")
        self._engines = self._wanted_engines()
        asked = {name: getattr(arguments, name) for name in ("seed", "scale", "quick")}
        self._report = Report(arguments.out, asked)

    def run(self) -> bool:
        """Measure every shape and return whether all went well."""
        for shape in self._arguments.shapes:
            with contextlib.ExitStack() as stack:
                kept = self._arguments.weights_dir
                if kept is None:
                    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
                else:
                    scratch = kept / f"{shape.resolve().name}-{self._arguments.seed}"
                    scratch.mkdir(parents=True, exist_ok=True)
                self._measure(shape.resolve(), scratch)
        return self._report.good

    def _wanted_engines(self) -> list[str]:
        engines = self._arguments.engines.split(",")
        unknown = [engine for engine in engines if engine not in ENGINES]
        if unknown:
            raise SystemExit(f"--engines: {unknown[0]!r} is none of {', '.join(ENGINES)}")
        if self._arguments.deterministic and "deterministic" not in engines:
            engines.insert(engines.index("ours") + 1 if "ours" in engines else 0, "deterministic")
        missing = [e for e in engines if e in ("vllm", "transformers") and importlib.util.find_spec(e) is None]
        if missing:
            print(f"not installed, left out: {', '.join(missing)}")
        return [engine for engine in engines if engine not in missing]

    def _measure(self, shape: Path, scratch: Path) -> None:
        has_weights = any(shape.glob("*.safetensors")) or self._arguments.weights_in_memory
        if not has_weights:
            shutil.copy(shape / "config.json", scratch)
        job = self._job(shape.name, shape if has_weights else scratch)
        entry = self._report.add_shape(shape.name)
        needs_weights = self._arguments.profile or {"ours", "deterministic"} & set(self._engines)
        self._run(replace(job, task="prepare", make_weights=bool(needs_weights) and not has_weights), "prepare", entry)
        device = self._report.json.get("card")
        if device is None:
            raise SystemExit(f"the device could not be measured: {entry['errors'].get('prepare')}")
        card = Card(**device["used_for_limits"])
        limits = Limits.of(job, device["itemsize"], card)
        for row in self._rows:
            entry["rows"][row.key] = {"name": row.name, "unit": row.unit, "limit": row.limit(limits)}
        for engine in self._engines:
            self._run(replace(job, engine=engine), engine, entry)
        print(f"\n{shape.name}, limits from {limits.card}\n\n{table(entry, self._engines)}\n", flush=True)
        if job.profile:
            job = replace(job, task="profile", bandwidth=card.bandwidth, arithmetic=card.arithmetic)
            self._run(job, "profile", entry)
            print("\n".join(map(profile_table, entry["profile"])), flush=True)

    def _job(self, shape: str, model: Path) -> Job:
        a = self._arguments
        return Job(
            task="rows",
            model=str(model),
            shape=shape,
            seed=a.seed,
            scale=a.scale,
            quick=a.quick,
            rows=a.rows,
            max_num_seqs=a.max_num_seqs,
            max_num_batched_tokens=a.max_num_batched_tokens,
            ours=dict(a.ours),
            vllm=dict(a.vllm),
            weights_in_memory=a.weights_in_memory,
            long=a.long,
            repeats=a.repeats,
            profile=str(a.profile) if a.profile else "",
            bandwidth=a.bandwidth * 1e12,
            arithmetic=a.arithmetic * 1e12,
        )

    def _run(self, job: Job, name: str, entry: Json) -> None:
        """Run a task, and write its events to the screen and the report."""
        with contextlib.closing(run_task(job, self._arguments.timeout)) as events:
            for event in events:
                line = self._report.note(event, name, entry)
                print(f"[{time.monotonic() - self._began:6.1f} s] {name}: {line}", flush=True)


def parse_arguments() -> argparse.Namespace:
    keys = ", ".join(row.key for row in (*make_rows(1.0, quick=False), *make_long_rows(1.0)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--engines", default="ours,vllm,transformers", help="some of " + ", ".join(ENGINES))
    parser.add_argument("--rows", default="*", help=f"keys or shell patterns of rows: {keys}")
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/engine_bench.json"))
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also trace our steps, and write the traces there")
    parser.add_argument("--deterministic", action="store_true", help="also run Baton's engine with --deterministic")
    parser.add_argument("--long", action="store_true", help="also long prompts and contexts, and uneven lengths")
    parser.add_argument("--repeats", type=int, default=0, help="at least so many of each row")
    parser.add_argument("--quick", action="store_true", help="fewer rows, shorter runs")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for lengths and numbers of requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-num-seqs", type=int, default=1024, help="limit for Baton and vLLM; vLLM's own default on an H200"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=16_384, help="limit for Baton and vLLM")
    for engine in ("ours", "vllm"):
        parser.add_argument(
            f"--{engine}",
            action="append",
            type=setting,
            default=[],
            metavar="KEY=VALUE",
            help="a setting of this engine",
        )
    parser.add_argument("--bandwidth", type=float, default=0.0, help="TB/s for the limits; measured unless given")
    parser.add_argument("--arithmetic", type=float, default=0.0, help="TFLOP/s for the limits; measured unless given")
    parser.add_argument("--weights-dir", type=Path, help="folder that keeps random weights for the next run")
    parser.add_argument(
        "--weights-in-memory", action="store_true", help="write no random weights: make them when Baton's engine starts"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one engine on one shape")
    return parser.parse_args()


def main() -> None:
    # The processes of a task are not in this process's group, so SIGTERM must also run the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parse_arguments()
    good = Bench(arguments).run()
    print(f"written to {arguments.out}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
