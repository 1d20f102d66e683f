"""Where the time of our engine's steps goes: by kind of kernel, beside what the device would need at best."""

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loadtest.common.job import Job, Json
from loadtest.engine import device
from loadtest.engine.device import Card
from loadtest.engine.engines import Ours
from loadtest.engine.limits import Limits
from loadtest.engine.rows import scaled

STEPS = 8
# Enough output tokens that no request ends while others are still in prefill.
OUTPUTS = 256
# The first that matches counts. Names are those of kernels on a GPU, of torch's operators on CPU.
GROUPS = {
    "ranks": r"_rank_sum_kernel|_two_step_kernel|_best_of_shards_kernel|nccl",
    "attention": r"_decode_kernel|_parts_kernel|_join_kernel|_prefill_kernel|_head_product|attention|flash|fmha|sdpa",
    "norm": r"norm",
    "rope": r"rope",
    "activation": r"silu|gelu|gate_mul|quantize_gate",
    "rounding": r"_quantize_kernel",
    "sampling": r"_partial_kernel|_choose_kernel|_thresholds_kernel|_penalties_kernel|_logprobs_kernel|argmax|softmax",
    "routing": r"_route_kernel|_choose_experts_kernel|_count_kernel|_group_kernel|sum_kernel",
    "gemm": r"gemm|gemv|nvjet|cutlass|xmma|splitk"
    r"|_(row|few_rows|tiles|blocks|grouped|scaled|dequantize|finish|hopper|gate_up|down)_kernel"
    r"|linear|aten::mm|addmm|matmul",
    "copies": r"memcpy|memset|_move_kernel|_unpack_kernel|copy|fill|index|embedding|scatter|gather|aten::to|cat",
    "other": r"",
}

Sums = tuple[dict[str, float], dict[str, int], float]


def kernel_group(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


def sum_trace(events: list[Json]) -> Sums:
    """Return for a Chrome trace: microseconds by group, kernels by group, and microseconds in which any of them ran.

    A kernel that starts early waits for the ones before it. Of kernels that run at once, the first one counts.
    """
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu = bool(kernels)
    if not on_gpu:
        kernels = [event for event in events if event.get("cat") == "cpu_op"]
    spent: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    counts: dict[str, int] = dict.fromkeys(GROUPS, 0)
    reached = float("-inf")
    for event in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        # Operators nest, and the outermost has the telling name.
        if on_gpu or event["ts"] >= reached:
            spent[kernel_group(event["name"])] += max(end - max(event["ts"], reached), 0.0)
            counts[kernel_group(event["name"])] += 1
        reached = max(reached, end)
    return spent, counts, sum(spent.values())


class StepProfiler:
    """Traces steps of an engine and reports how their time is spent."""

    def __init__(self, ours: Ours, limits: Limits, folder: Path, prefix: str) -> None:
        self._ours, self._limits, self._folder, self._prefix = ours, limits, folder, prefix

    def decode(self, count: int, length: int, key: str) -> Json:
        """Report a decode step of so many sequences, some steps after their prompts of this length."""
        engine = self._ours.engine
        self._ours.add(self._ours.random_prompts([length] * count), [OUTPUTS] * count)
        running = engine.scheduler.running
        while engine.scheduler.waiting or any(sequence.output_len < 4 for sequence in running):
            engine.step()
        device.synchronize()
        start = time.perf_counter()
        self._step(4 * STEPS)
        device.synchronize()
        wall = (time.perf_counter() - start) / (4 * STEPS)
        contexts = [sequence.num_tokens for sequence in running]
        sums = self._trace(lambda: self._step(STEPS), key)
        for sequence in list(running):
            engine.abort(sequence.request.id)
        while engine.has_work:
            engine.step()
        known = self._limits.others(count, count)
        known |= {"gemm": self._limits.products(count, count), "attention": self._limits.decode_attention(contexts)}
        return _report(f"decode step, batch {count}", sums, STEPS, wall, known)

    def prefill(self, lengths: list[int], key: str) -> Json:
        ones = [1] * len(lengths)
        self._ours.generate(lengths, ones)
        wall = statistics.median(self._ours.generate(lengths, ones) for _ in range(3))
        sums = self._trace(lambda: self._ours.generate(lengths, ones), key)
        known = self._limits.others(sum(lengths), len(lengths))
        known["gemm"] = self._limits.products(sum(lengths), len(lengths))
        known["attention"] = self._limits.prefill_attention(lengths)
        return _report(f"prefill, {len(lengths)} x {lengths[0]}", sums, 1, wall, known)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._ours.engine.step()

    def _trace(self, action: Callable[[], object], key: str) -> Sums:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.on_gpu() else [])]) as trace:
            action()
            device.synchronize()
        path = self._folder / f"{self._prefix}-{key}.json"
        trace.export_chrome_trace(str(path))
        return sum_trace(json.loads(path.read_text())["traceEvents"])


def _report(name: str, sums: Sums, steps: int, wall: float, known: dict[str, float]) -> Json:
    """sums: as sum_trace has them, of `steps` steps. wall, and known by group: seconds of one step."""
    spent, counts, busy = sums
    groups = {
        group: {"ms": spent[group] / steps / 1e3, "kernels": counts[group] / steps, "limit_ms": None}
        for group in GROUPS
        if counts[group]
    }
    for group in groups.keys() & known.keys():
        groups[group]["limit_ms"] = known[group] * 1e3
    return {"name": name, "wall_ms": wall * 1e3, "busy_ms": busy / steps / 1e3, "groups": groups}


def profile_steps(ours: Ours, job: Job) -> Iterator[Json]:
    """Yield reports of decode steps of four batch sizes, and of the prefill of four prompts."""
    folder = Path(job.profile)
    folder.mkdir(parents=True, exist_ok=True)
    limits = Limits.of(job, device.itemsize(), Card(job.bandwidth, job.arithmetic))
    profiler = StepProfiler(ours, limits, folder, job.shape)
    for batch in (1, 8, 32, 256):
        yield profiler.decode(scaled(batch, job.scale), scaled(512, job.scale), f"decode-{batch}")
    yield profiler.prefill([scaled(2048, job.scale)] * 4, "prefill")
