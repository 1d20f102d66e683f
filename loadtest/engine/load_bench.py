"""How long the weights of a model take from local disk, and from the page cache, to the device.

The shape is a folder with a config.json. If it has no weights, random ones are written to --weights-dir. Every figure
comes from a process of its own.

- The first table has the ways to load: Baton's own, the one before it (one tensor at a time from memory-mapped files),
  and the libraries that are installed (runai-model-streamer, fastsafetensors, instanttensor). The seconds are those
  from the first header to the last tensor on the device. "GB read" is what came from storage and not from the page
  cache; "host GB" is the most memory of the host that the process took meanwhile, mapped files included.
- The second table has engines: the seconds in which they load their weights, and those from the start of the process
  until they are ready and until the first token of a prompt of 16.

Before a row "disk" the files' pages are dropped from the page cache, before a row "cache" all files are read once.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.read_ahead import AHEAD_BYTES, PIECE_BYTES, THREADS
from loadtest.common.bench_table import aligned, figure
from loadtest.common.job import Json
from loadtest.common.random_weights import INDEX, write_random_weights
from loadtest.common.servers import setting
from loadtest.engine import device
from loadtest.engine.load_ways import RESULT, STARTS, WAYS, LoadJob, command

_CHUNK = 16 << 20


def drop_from_cache(folder: Path) -> None:
    """Drop the pages of all weights from the page cache."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            # Pages that are not written yet would stay.
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def bring_into_cache(folder: Path) -> None:
    buffer = bytearray(_CHUNK)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


class LoadBench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self.rows: list[Json] = []

    def run(self) -> None:
        for kind, chosen, known in (
            ("load", self._arguments.ways, {name: package for name, (package, _) in WAYS.items()}),
            ("start", self._arguments.engines, {name: package for name, (package, _) in STARTS.items()}),
        ):
            for way in _installed(chosen, known):
                for source in self._arguments.sources.split(","):
                    self._measure(kind, way, source)

    def table(self, kind: str) -> str:
        columns = {
            "load": [("s", "seconds", 1.0), ("GB/s", "rate", 1e9), ("GB read", "from_storage", 1e9)],
            "start": [("weights s", "weights", 1.0), ("ready s", "ready", 1.0), ("first token s", "answer", 1.0)],
        }[kind]
        columns.append(("host GB", "host_bytes", 1e9) if kind == "load" else ("GB read", "from_storage", 1e9))
        rows = [row for row in self.rows if row["kind"] == kind]
        lines = [["way" if kind == "load" else "engine", "from", *(title for title, _, _ in columns), ""]]
        for row in rows:
            cells = [figure(row[key] / unit) if row.get(key) is not None else "" for _, key, unit in columns]
            lines.append([row["way"], row["source"], *cells, row.get("error", "")])
        return aligned(lines, 2) if rows else ""

    def _measure(self, kind: str, way: str, source: str) -> None:
        samples = []
        for _ in range(self._arguments.repeat):
            drop_from_cache(self._folder) if source == "disk" else bring_into_cache(self._folder)
            samples.append(self._sample(kind, way))
        row: Json = {"kind": kind, "way": way, "source": source, "samples": samples}
        good = [sample for sample in samples if "error" not in sample]
        for key in good[0] if good else ():
            values = [sample[key] for sample in good if sample[key] is not None]
            row[key] = statistics.median_low(values) if values else None
        if len(good) < len(samples):
            row["error"] = next(sample["error"] for sample in samples if "error" in sample)
        elif kind == "load":
            row["rate"] = row["bytes"] / row["seconds"]
            first = next((other for other in self.rows if "sum" in other), row)
            if row["sum"] != first["sum"]:
                row["error"] = f"other bytes than {first['way']}"
        self.rows.append(row)
        print(f"{kind} {way} from {source}: {json.dumps(samples)}", flush=True)

    def _sample(self, kind: str, way: str) -> Json:
        a = self._arguments
        job = LoadJob(
            way=way, folder=str(self._folder), began=time.time(), threads=a.threads, ahead_bytes=a.ahead << 20,
            piece_bytes=a.piece << 20, ours=dict(a.ours), vllm=dict(a.vllm),
        )  # fmt: skip
        # Engines start processes of their own, which end with their group.
        process = subprocess.Popen(
            command(kind, job), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, errors = process.communicate(timeout=a.timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {a.timeout:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in output.splitlines():
            if line.startswith(RESULT):
                result: Json = json.loads(line.removeprefix(RESULT))
                return result
        lines = [line for line in errors.splitlines() if line.strip()]
        return {"error": lines[-1][:200] if lines else f"exit code {process.returncode}"}


def _installed(chosen: str, packages: dict[str, str]) -> list[str]:
    names = [name for name in chosen.split(",") if name]
    unknown = [name for name in names if name not in packages]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is none of {', '.join(packages)}")
    missing = [name for name in names if importlib.util.find_spec(packages[name]) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    return [name for name in names if name not in missing]


def model_folder(shape: Path, weights_dir: Path) -> Path:
    """Return a folder with the shape's config and weights, which are written unless there are any."""
    if any(shape.glob("*.safetensors")):
        return shape
    folder = weights_dir / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape / "config.json", folder)
    # The index is written last, so its presence means that the weights are complete.
    if not (folder / INDEX).exists():
        began = time.perf_counter()
        write_random_weights(folder, 0)
        print(f"wrote random weights in {time.perf_counter() - began:.1f} s", flush=True)
    return folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}, or nothing")
    parser.add_argument("--engines", default=",".join(STARTS), help=f"some of {', '.join(STARTS)}, or nothing")
    parser.add_argument("--sources", default="disk,cache", help="disk, cache or both")
    parser.add_argument("--weights-dir", type=Path, default=Path("loadtest/out/weights"), help="where weights are kept")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each row, of which the median counts")
    parser.add_argument("--threads", type=int, default=THREADS, help="of Baton's way")
    parser.add_argument("--ahead", type=int, default=AHEAD_BYTES >> 20, help="MiB that Baton reads ahead")
    parser.add_argument("--piece", type=int, default=PIECE_BYTES >> 20, help="MiB that a thread of Baton reads at once")
    for engine in ("ours", "vllm"):
        parser.add_argument(
            f"--{engine}",
            action="append",
            type=setting,
            default=[],
            metavar="KEY=VALUE",
            help="a setting of the engine",
        )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/load_bench.json"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bench = LoadBench(arguments, model_folder(arguments.shape.resolve(), arguments.weights_dir))
    bench.run()
    facts = {"shape": arguments.shape.name, "device": device.describe(), "rows": bench.rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(facts, indent=1))
    for kind in ("load", "start"):
        print(f"\n{bench.table(kind)}", flush=True)
    print(f"\nwritten to {arguments.out}")
    sys.exit(1 if any("error" in row for row in bench.rows) else 0)


if __name__ == "__main__":
    main()
