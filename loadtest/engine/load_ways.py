"""One measurement of load_bench.py in a process of its own: load_ways.py KIND JOB, with the job as JSON."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch
from safetensors import safe_open

from baton_engine import runner
from baton_engine.load_plan import planned_takes
from baton_engine.loading import Weights
from baton_engine.models.registry import load_model_config, model_class
from baton_engine.read_ahead import AHEAD_BYTES, PIECE_BYTES, THREADS, Range, ReadAhead
from loadtest.common.job import Job, Json
from loadtest.engine import device
from loadtest.engine.engines import ENGINES

Tensors = dict[str, torch.Tensor]
# Begins the line with the result. Engines print other lines.
RESULT = "result of load_ways.py: "


@dataclass(frozen=True)
class LoadJob:
    """way: a key of WAYS or STARTS. began: when the process was started, as time.time() gives it.

    threads, ahead_bytes, piece_bytes: those of ReadAhead.
    """

    way: str
    folder: str
    began: float
    threads: int = THREADS
    ahead_bytes: int = AHEAD_BYTES
    piece_bytes: int = PIECE_BYTES
    ours: Json = field(default_factory=dict)
    vllm: Json = field(default_factory=dict)


class TimedWeights(Weights):
    """Baton's way, with the sizes of the job. seconds: from the first header to the last tensor."""

    job: LoadJob
    seconds = 0.0

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, progress: Any = None) -> None:
        self._began = time.perf_counter()
        super().__init__(folder, dtype, device, progress)
        self._files = ReadAhead(device, self.job.ahead_bytes, self.job.threads, self.job.piece_bytes)

    def __exit__(self, *error: Any) -> None:
        device.synchronize()
        super().__exit__(*error)
        TimedWeights.seconds = time.perf_counter() - self._began


class MappedWeights(TimedWeights):
    """One tensor at a time from memory-mapped files, by safetensors' own library."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mapped: dict[Path, Any] = {}

    def expect(self, ranges: Iterable[Range]) -> None:
        pass

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        path = self.range(name, shape, part).path
        if path not in self._mapped:
            self._mapped[path] = safe_open(path, framework="pt")
        tensor = self._mapped[path].get_slice(name)[part or tuple(slice(0, size) for size in shape)]
        self._untaken.discard(name)
        return torch.empty_like(tensor, dtype=dtype, device=self.device).copy_(tensor)


def _take_all(kind: type[TimedWeights], folder: Path, target: torch.device) -> Tensors:
    model = load_model_config(folder)
    with kind(folder, torch.bfloat16, target) as weights:
        takes = planned_takes(
            lambda source: model_class(model.architecture)(model, source, 1), weights.dtype, weights.names
        )
        weights.expect(weights.range(take.name, take.shape, take.part) for take in takes)
        return {take.name: weights.take(*take) for take in takes}


def _ours(folder: Path, target: torch.device) -> Tensors:
    return _take_all(TimedWeights, folder, target)


def _one_by_one(folder: Path, target: torch.device) -> Tensors:
    return _take_all(MappedWeights, folder, target)


def _runai(folder: Path, target: torch.device) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_files(folder))
        # On a CPU the tensors are the caller's own already.
        return {name: tensor.to(target) for name, tensor in streamer.get_tensors()}


def _fastsafetensors(folder: Path, target: torch.device) -> Tensors:
    from fastsafetensors import ParallelLoader

    # GPUDirect Storage needs a driver and a file system that few machines have.
    loader = ParallelLoader(None, _files(folder), device=str(target), nogds=True, use_tqdm_on_load=False)
    try:
        return dict(loader.iterate_weights())
    finally:
        loader.close()


def _instanttensor(folder: Path, target: torch.device) -> Tensors:
    from instanttensor import safe_open as open_files

    with open_files(_files(folder), framework="pt", device=target) as files:
        return dict(files.tensors())


# The name of the package that each way needs, and the way.
WAYS: dict[str, tuple[str, Callable[[Path, torch.device], Tensors]]] = {
    "ours": ("torch", _ours),
    "one-by-one": ("safetensors", _one_by_one),
    "runai": ("runai_model_streamer", _runai),
    "fastsafetensors": ("fastsafetensors", _fastsafetensors),
    "instanttensor": ("instanttensor", _instanttensor),
}
# The name of the package that each engine needs, and how it gets its weights.
STARTS: dict[str, tuple[str, type[TimedWeights] | None]] = {
    "ours": ("torch", TimedWeights),
    "one-by-one": ("safetensors", MappedWeights),
    "vllm": ("vllm", None),
}


def load(job: LoadJob) -> Json:
    """Load all tensors and keep them. The result has a sum over their bytes, by which ways are compared."""
    target = torch.device("cuda", 0) if device.on_gpu() else torch.device("cpu")
    torch.zeros(1, device=target)
    device.synchronize()
    before, memory = _from_storage(), _status("VmRSS")
    began = time.perf_counter()
    tensors = WAYS[job.way][1](Path(job.folder), target)
    device.synchronize()
    seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "seconds": seconds,
        "bytes": size,
        "from_storage": _from_storage() - before,
        # On a CPU the tensors themselves are in the host's memory.
        "host_bytes": _status("VmHWM") - memory - (0 if device.on_gpu() else size),
        "sum": sum(int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors.values()),
    }


def start(job: LoadJob) -> Json:
    """Start an engine and let it answer a short prompt. Times count from the start of this process."""
    weights = STARTS[job.way][1]
    if weights is not None:
        runner.Weights = weights  # type: ignore[misc]
    before = _from_storage()
    settings = Job(
        task="rows", model=job.folder, shape="", seed=0, scale=1.0, quick=True, rows="*", max_num_seqs=256,
        max_num_batched_tokens=8192, ours=job.ours, vllm={"load_format": "auto", **job.vllm},
        engine="vllm" if weights is None else "ours",
    )  # fmt: skip
    engine = ENGINES[settings.engine](settings)
    ready = time.time() - job.began
    engine.generate([16], [1])
    return {
        "weights": TimedWeights.seconds if weights else None,
        "ready": ready,
        "answer": time.time() - job.began,
        # vLLM reads in a process of its own.
        "from_storage": _from_storage() - before if weights else None,
    }


def _files(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.safetensors")))


def _from_storage() -> int:
    """Return the bytes that this process has read from storage, not from the page cache."""
    return _field("/proc/self/io", "read_bytes")


def _status(name: str) -> int:
    return _field("/proc/self/status", name) << 10


def _field(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines() if os.path.exists(path) else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def command(kind: str, job: LoadJob) -> list[str]:
    """Return the command that measures a job. kind: "load" or "start"."""
    return [sys.executable, __file__, kind, json.dumps(asdict(job))]


def main(kind: str, text: str) -> None:
    TimedWeights.job = LoadJob(**json.loads(text))
    result = {"load": load, "start": start}[kind](TimedWeights.job)
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
