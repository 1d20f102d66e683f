"""Prefill and decode on a GPU each, beside the decode pod alone: what a hand-over adds, as a client sees it.

Usage: pd_bench.py SHAPE_DIR [--transport auto|tcp|grpc] [--out FILE]. One prefill pod, one decode pod, and two
gateways before the latter: one hands prompts over, for the other the decode pod prefills by itself. Random weights,
prefix caches off, temperature 0.6. On a machine without GPUs both pods share the CPU.

first hand-over: from the link between the two pods to the connection between their GPUs, which no request waits for.
lone TTFT: of one request at a time through either gateway. exposed hand-over: how much later than the next ones the
second token comes, the first being the prefill pod's. beside hand-overs: the time between tokens of 32 long answers,
which the decode pod prefilled, alone and while prompts of 1,024 tokens are handed over 8 times a second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from bench_table import aligned, figure
from client import Answer, Load, drive
from engine_bench import setting
from random_tokenizer import write_random_tokenizer
from random_weights import write_random_weights
from servers import HOST, as_flags

from baton_cli.ports import free_loopback_ports
from baton_engine.model_config import load_model_config

_START_S = 300.0


class Pods:
    """Two workers and two gateways, and what they log."""

    def __init__(self, model: Path, transport: str, flags: list[str], folder: Path) -> None:
        self.folder = folder
        prefill, decode, self.handing_over, self.alone = free_loopback_ports(4)
        longest = min(8192, load_model_config(model).max_position_embeddings)
        common = ["--max-model-len", str(longest), "--no-enable-prefix-caching", *flags]
        gateway = ["--admin-port", "0", "--decode-addresses", f"{HOST}:{decode}"]
        # Each sees its own GPU first and the other's too, as NCCL copies between them wants it.
        self._processes = [
            self._start("prefill", model, prefill, common, "0,1"),
            self._start("decode", model, decode, [*common, "--kv-transport", transport], "1,0"),
            self._start(
                "gateway",
                model,
                self.handing_over,
                # It is about hand-overs, also where the decode pod would be faster.
                [*gateway, "--prefill-addresses", f"{HOST}:{prefill}", "--no-local-prefill"],
                "",
                "pd",
            ),
            self._start("gateway", model, self.alone, gateway, "", "alone"),
        ]

    def _start(
        self, service: str, model: Path, port: int, flags: list[str], gpus: str, name: str = ""
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "baton_cli", service, "--model", str(model), "--served-model-name", "m"]
        command += ["--host", HOST, "--port", str(port), *flags]
        with (self.folder / f"{name or service}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self, transport: str) -> None:
        """Raises RuntimeError when they do not get ready."""
        awaits_pair = transport == "auto" and torch.cuda.device_count() > 1
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            with contextlib.suppress(OSError):
                for port in (self.handing_over, self.alone):
                    urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=2).read()
                if not awaits_pair or self.events("decode", "paired", "transport_fallback"):
                    return
            time.sleep(0.2)
        ends = (f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log"))
        raise RuntimeError("not ready:\n" + "\n".join(ends))

    def events(self, name: str, *events: str) -> list[dict[str, Any]]:
        """Return the log lines of a process about one of these events."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        parsed = (json.loads(line) for line in lines if re.match(r'\{.*"event"', line))
        return [line for line in parsed if line["event"] in events]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


@contextlib.contextmanager
def running(model: Path, arguments: argparse.Namespace) -> Iterator[Pods]:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pods = Pods(model, arguments.transport, as_flags(dict(arguments.settings)), arguments.out.parent)
    try:
        pods.wait_until_ready(arguments.transport)
        yield pods
    finally:
        pods.stop()


def checked(answers: list[Answer]) -> list[Answer]:
    """Raises RuntimeError when one of them failed."""
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return answers


def median_ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


def gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in zip(answer.events, answer.events[1:], strict=False)]


class Bench:
    def __init__(self, arguments: argparse.Namespace, pods: Pods, vocab: int) -> None:
        self._arguments, self._pods, self._vocab = arguments, pods, vocab
        self._rows: dict[str, float] = {}

    async def run(self) -> dict[str, float]:
        linked = self._pods.events("decode", "linked")
        paired = self._pods.events("decode", "paired")
        if linked and paired:
            self._note("first hand-over of the pair, s", seconds_between(linked[0], paired[0]))
        scale = self._arguments.scale
        for tokens in (max(round(length * scale), 4) for length in (1024, 4000)):
            load = Load("lone", "", tokens, 24, self._arguments.repeats)
            for port in (self._pods.handing_over, self._pods.alone):  # what is compiled or captured at first use
                await self._drive(port, load)
            pd, alone = await self._drive(self._pods.handing_over, load), await self._drive(self._pods.alone, load)
            for name, answers in (("P/D", pd), ("aggregated", alone)):
                self._note(f"{tokens} tokens, lone TTFT {name}, ms", median_ms([a.events[0] - a.due for a in answers]))
            for name, answers in (("exposed hand-over", pd), ("the same, aggregated", alone)):
                late = [gaps(answer)[0] - statistics.median(gaps(answer)[2:]) for answer in answers]
                self._note(f"{tokens} tokens, {name}, ms", median_ms(late))
        await self._beside(max(round(1024 * scale), 4))
        return self._rows

    async def _beside(self, tokens: int) -> None:
        seconds = self._arguments.seconds
        long = Load("long", "", max(tokens // 4, 4), max(round(150 * seconds), 20), 32, concurrency=32)
        handed = Load("handed", "", tokens, 2, max(round(8 * seconds), 1), rate=8.0)
        alone = await self._drive(self._pods.alone, long)
        beside, _ = await asyncio.gather(
            self._drive(self._pods.alone, long), self._drive(self._pods.handing_over, handed)
        )
        quiet, busy = (median_ms([gap for a in answers for gap in gaps(a)]) for answers in (alone, beside))
        self._note("time between tokens of 32 answers, ms", quiet)
        self._note("the same beside hand-overs, ms", busy)
        self._note("slower by, %", (busy / quiet - 1) * 100)

    async def _drive(self, port: int, load: Load) -> list[Answer]:
        return checked(await drive(HOST, port, load, self._arguments.seed, self._vocab))

    def _note(self, name: str, value: float) -> None:
        self._rows[name] = value
        print(f"{name}: {figure(value)}", flush=True)


def seconds_between(first: dict[str, Any], second: dict[str, Any]) -> float:
    begun, ended = (datetime.fromisoformat(line["time"]) for line in (first, second))
    return (ended - begun).total_seconds()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "grpc"])
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/pd/pd_bench.json"), help="logs go beside it")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=6.0, help="of hand-overs beside answers")
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights-dir", type=Path, help="where random weights stay for the next run")
    parser.add_argument(
        "--set", dest="settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag of both workers",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="baton-pd-") as name:
        model = arguments.weights_dir or Path(name)
        model.mkdir(parents=True, exist_ok=True)
        shutil.copy(arguments.shape / "config.json", model)
        vocab = load_model_config(model).vocab_size
        write_random_tokenizer(model, vocab)
        if not any(model.glob("*.safetensors")):
            write_random_weights(model, arguments.seed)
        with running(model, arguments) as pods:
            rows = asyncio.run(Bench(arguments, pods, vocab).run())
    print("\n" + aligned([[row, figure(value)] for row, value in rows.items()], 1))
    arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
