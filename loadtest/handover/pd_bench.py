"""Measures at the client what a hand-over costs: prefill and decode on a GPU each, beside the decode pod alone.

Usage: pd_bench.py SHAPE_DIR [--ranks PREFILL DECODE] [--transport auto|tcp|grpc] [--out FILE]. There are one prefill
pod, one decode pod and two gateways. One gateway uses both pods; for the other the decode pod does the prefill as well.
Weights are random, prefix caches are off, the temperature is 0.6. The pods share GPUs where there are fewer than ranks,
and the CPU on a machine without GPUs.

- first hand-over: the time until the GPUs of two linked pods are connected. No request waits for it.
- lone TTFT: the TTFT of one request at a time, through each gateway.
- exposed hand-over: the prefill pod sends the first token and the decode pod the second. This is the time between these
  two, minus the median time between later tokens.
- beside hand-overs: the mean time between the tokens of an answer (the median of 32 long answers, which the decode pod
  has prefilled itself), alone and while 8 prompts of 1,024 tokens per second are handed over.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_bench.answer import Answer
from baton_engine.models.registry import load_model_config
from loadtest.common.bench_table import aligned, figure
from loadtest.common.client import Load, drive
from loadtest.common.random_model import write_random_model
from loadtest.common.servers import HOST, as_flags, setting
from loadtest.handover.pods import Pods, gpus_from, seconds_between


@contextlib.contextmanager
def running(model: Path, arguments: argparse.Namespace) -> Iterator[tuple[Pods, int, int]]:
    """Yield the pods, and the ports of the gateway that hands over and of the one that does not."""
    longest = min(8192, load_model_config(model).max_position_embeddings)
    common = ["--max-model-len", str(longest), "--no-enable-prefix-caching", *as_flags(dict(arguments.settings))]
    prefill_ranks, decode_ranks = arguments.ranks
    gpus = torch.cuda.device_count()
    first = max(min(prefill_ranks, gpus - decode_ranks), 0)
    with Pods(model, arguments.out.parent) as pods:
        prefill = pods.start("prefill", [*common, "--tensor-parallel", str(prefill_ranks)], gpus_from(0))
        flags = [*common, "--tensor-parallel", str(decode_ranks), "--kv-transport", arguments.transport]
        decode = pods.start("decode", flags, gpus_from(first))
        gateway = ["--admin-port", "0", "--decode-addresses", f"{HOST}:{decode}"]
        alone = pods.start("gateway", gateway, name="alone")
        # The benchmark measures hand-overs, even where a prefill on the decode pod would be faster.
        gateway += ["--prefill-addresses", f"{HOST}:{prefill}", "--no-local-prefill"]
        handing_over = pods.start("gateway", gateway, name="pd")
        pods.wait_until_ready(["decode"] if arguments.transport == "auto" and gpus > 1 else [])
        yield pods, handing_over, alone


def checked(answers: list[Answer]) -> list[Answer]:
    """Return the answers. Raises RuntimeError when one of them failed."""
    failed = [f"{answer.error}: {answer.detail}" for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return answers


def median_ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


class Bench:
    """handing_over, alone: ports of the two gateways. vocab: token ids of prompts are below it."""

    def __init__(self, arguments: argparse.Namespace, pods: Pods, handing_over: int, alone: int, vocab: int) -> None:
        self._arguments, self._pods, self._vocab = arguments, pods, vocab
        self._handing_over, self._alone = handing_over, alone
        self._rows: dict[str, float] = {}

    async def run(self) -> dict[str, float]:
        linked = self._pods.events("decode", "linked")
        paired = self._pods.events("decode", "paired")
        if linked and paired:
            self._note("first hand-over of the pair, s", seconds_between(linked[0], paired[0]))
        scale = self._arguments.scale
        for tokens in (max(round(length * scale), 4) for length in (1024, 4000)):
            load = Load("lone", "", tokens, 24, self._arguments.repeats)
            # Kernels are compiled and graphs captured at their first use.
            for port in (self._handing_over, self._alone):
                await self._drive(port, load)
            pd, alone = await self._drive(self._handing_over, load), await self._drive(self._alone, load)
            for name, answers in (("P/D", pd), ("aggregated", alone)):
                self._note(f"{tokens} tokens, lone TTFT {name}, ms", median_ms([a.ttft or 0.0 for a in answers]))
            for name, answers in (("exposed hand-over", pd), ("the same, aggregated", alone)):
                late = [answer.gaps[0] - statistics.median(answer.gaps[2:]) for answer in answers]
                self._note(f"{tokens} tokens, {name}, ms", median_ms(late))
        await self._beside(max(round(1024 * scale), 4))
        return self._rows

    async def _beside(self, tokens: int) -> None:
        seconds = self._arguments.seconds
        long = Load("long", "", max(tokens // 4, 4), max(round(150 * seconds), 20), 32, concurrency=32)
        handed = Load("handed", "", tokens, 2, max(round(8 * seconds), 1), rate=8.0)
        alone = await self._drive(self._alone, long)
        beside, _ = await asyncio.gather(self._drive(self._alone, long), self._drive(self._handing_over, handed))
        # Of an answer's mean time, because a client that shares its core reads several tokens at once.
        quiet, busy = (median_ms([tpot for a in answers if (tpot := a.tpot)]) for answers in (alone, beside))
        self._note("time between tokens of 32 answers, ms", quiet)
        self._note("the same beside hand-overs, ms", busy)
        self._note("slower by, %", (busy / quiet - 1) * 100)

    async def _drive(self, port: int, load: Load) -> list[Answer]:
        return checked(await drive(HOST, port, load, self._arguments.seed, self._vocab))

    def _note(self, name: str, value: float) -> None:
        self._rows[name] = value
        print(f"{name}: {figure(value)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR")
    parser.add_argument(
        "--ranks", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="of tensor parallel pods"
    )
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "grpc"])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("loadtest/out/pd/pd_bench.json"),
        help="report file; logs are written beside it",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the hand-overs beside running answers")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights-dir", type=Path, help="folder that keeps random weights for the next run")
    parser.add_argument(
        "--set", dest="settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag that both workers get",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="baton-pd-") as name:
        model = arguments.weights_dir or Path(name)
        vocab = write_random_model(model, (arguments.shape / "config.json").read_text(), arguments.seed).vocab_size
        with running(model, arguments) as (pods, handing_over, alone):
            rows = asyncio.run(Bench(arguments, pods, handing_over, alone, vocab).run())
    print("\n" + aligned([[row, figure(value)] for row, value in rows.items()], 1))
    arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
