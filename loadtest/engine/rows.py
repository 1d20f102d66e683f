"""The rows of the benchmark: requests with fixed numbers of tokens in and out, and the time that is measured."""

import fnmatch
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from loadtest.engine.limits import Limits

_LONG_S = 60.0


@dataclass(frozen=True)
class Row:
    """inputs, outputs: tokens of each request. short: those of each output in a first run, whose time is subtracted."""

    key: str
    name: str
    unit: str
    inputs: list[int]
    outputs: list[int]
    repeats: int = 1
    short: int = 0

    def measure(self, generate: Callable[[list[int], list[int]], float]) -> list[float]:
        """Return samples in the row's unit; generate: from tokens in and out of each request to seconds for all."""
        samples = []
        runs = 2 if self.repeats == 1 else 1
        for _ in range(self.repeats):
            seconds = _settled(lambda: generate(self.inputs, self.outputs), runs)
            if self.short:
                before = _settled(lambda: generate(self.inputs, [self.short] * len(self.inputs)), 3)
                seconds = (seconds - before) / (self.outputs[0] - self.short)
            samples.append(self._value(seconds))
        return samples

    def limit(self, limits: Limits) -> float:
        """Return the best value that the device allows, in the row's unit."""
        if self.short:
            decoded = (self.short + self.outputs[0]) // 2
            return self._value(limits.decode([length + decoded for length in self.inputs]))
        if self.unit in ("ms", "tok/s"):
            return self._value(limits.prefill(self.inputs))
        return self._value(limits.serve(self.inputs, self.outputs))

    def _value(self, seconds: float) -> float:
        if self.unit in ("ms", "ms/token"):
            return seconds * 1e3
        amounts = {"tok/s": sum(self.inputs), "req/s": len(self.inputs), "out tok/s": sum(self.outputs)}
        return amounts[self.unit] / seconds


def _settled(run: Callable[[], float], runs: int) -> float:
    """Repeat a run `runs` times, and if that is more than once, until it becomes no faster; return the least time.
    Engines compile kernels in the first run of a kind or in a later one, which must neither count nor be subtracted.
    In a run of a minute they hardly count, so it is not repeated."""
    times = [run()]
    if times[0] > _LONG_S:
        return times[0]
    times += [run() for _ in range(runs - 1)]
    while runs > 1 and times[-1] < 0.9 * min(times[:-1]) and len(times) < runs + 4:
        times.append(run())
    return min(times)


def times_better(unit: str, value: float, other: float) -> float:
    """Return how many times better a value is than another of the same unit."""
    return value / other if unit.endswith("/s") else other / value


def scaled(count: int, scale: float) -> int:
    return max(round(count * scale), 1)


def make_rows(scale: float, quick: bool) -> list[Row]:
    """Return all rows, lengths and numbers of requests multiplied by `scale`."""
    rows = []
    short, more = scaled(8, scale), scaled(64 if quick else 256, scale)
    for batch in (1, 32, 256) if quick else (1, 8, 32, 128, 256):
        count, repeats = scaled(batch, scale), 3 if batch == 1 and not quick else 1
        inputs, outputs = [scaled(512, scale)] * count, [short + more] * count
        name = f"decode, batch {count}, {inputs[0]} in"
        rows.append(Row(f"decode-{batch}", name, "ms/token", inputs, outputs, repeats, short))
    count, length = scaled(64, scale), scaled(2048, scale)
    rows.append(Row("prefill", f"prefill, {count} x {length}", "tok/s", [length] * count, [1] * count))
    for prompt in (2048, 16):
        length = scaled(prompt, scale)
        rows.append(
            Row(f"first-{prompt}", f"one prompt of {length}, first token", "ms", [length], [1], 3 if quick else 7)
        )
    if quick:
        return rows
    count, length, answer = scaled(512, scale), scaled(1024, scale), scaled(128, scale)
    name = f"{count} requests, {length} in / {answer} out"
    rows.append(Row("requests", name, "req/s", [length] * count, [answer] * count))
    rng, low, high = random.Random(0), scaled(100, scale), scaled(1024, scale)
    inputs, outputs = ([rng.randint(low, high) for _ in range(scaled(256, scale))] for _ in range(2))
    rows.append(Row("tokens", f"{len(inputs)} requests, {low}-{high} in and out", "out tok/s", inputs, outputs))
    return rows


def warm_up_rows(scale: float) -> list[Row]:
    """Return what to run untimed: prompts small and large, decodes, and both in one step, which have other kernels."""
    rng = random.Random(1)
    inputs, outputs = ([rng.randint(low, high) for _ in range(64)] for low, high in ((100, 1024), (2, 32)))
    rows = [
        Row("first-64", "", "ms", [64] * 8, [16] * 8),
        Row("prefill", "", "tok/s", [2048] * 8, [1] * 8),
        Row("decode-8", "", "ms", [512] * 8, [4] * 8),
        Row("first-16", "", "ms", [16], [1]),
        Row("tokens", "", "out tok/s", inputs, outputs),
    ]
    return [replace(row, inputs=[scaled(n, scale) for n in row.inputs]) for row in rows]


def select_rows(rows: list[Row], patterns: str) -> list[Row]:
    """Return the rows whose keys match one of the comma-separated shell patterns."""
    wanted = patterns.split(",")
    return [row for row in rows if any(fnmatch.fnmatchcase(row.key, pattern) for pattern in wanted)]
