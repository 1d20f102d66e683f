"""Baton beside Hugging Face transformers on this machine's CPU: one run, same weights, same thread count.

Usage: cpu_bench.py [--out FILE] [--repeats N]. Prints a table and writes JSON. Times are medians, but
for generate one at a time, which runs once.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request

VOCAB = 32_000
INPUT, OUTPUT, BATCH = 256, 64, 16
LONG_PROMPT = 1024


def make_model(folder: Path) -> LlamaForCausalLM:
    """Write a Llama of 100 million random parameters and return it, ready to generate."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    return model


def random_prompts(count: int, length: int) -> list[list[int]]:
    prompts: list[list[int]] = torch.randint(0, VOCAB, (count, length)).tolist()
    return prompts


def generate(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    inputs = torch.tensor(prompts)
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=OUTPUT,
        min_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )


def run_engine(engine: Engine, prompts: list[list[int]]) -> None:
    for index, prompt in enumerate(prompts):
        engine.add(Request(id=index, prompt=prompt, sampling=SamplingParams(max_tokens=OUTPUT)))
    while engine.has_work:
        engine.step()


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bench_generation(model: LlamaForCausalLM, folder: Path, repeats: int) -> dict[str, float]:
    """Return seconds for each way to answer 16 requests, and one; the ways take turns, so that noise hits all alike."""
    # The number of threads applies to torch in this process, and so to both ways.
    threads = torch.get_num_threads()
    engine = Engine(EngineConfig(model=str(folder), enable_prefix_caching=False, num_threads=threads))

    def one_at_a_time() -> None:
        for prompt in random_prompts(BATCH, INPUT):
            generate(model, [prompt])

    ways: dict[str, Callable[[], None]] = {
        "baton_16": lambda: run_engine(engine, random_prompts(BATCH, INPUT)),
        "generate_batch_16": lambda: generate(model, random_prompts(BATCH, INPUT)),
        "baton_1": lambda: run_engine(engine, random_prompts(1, INPUT)),
        "generate_1": lambda: generate(model, random_prompts(1, INPUT)),
    }
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(timed(way))
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["generate_one_at_a_time_16"] = timed(one_at_a_time)
    return medians


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """Run `baton up` on the model and yield its URL. Each engine has all cores, as only one computes at a time."""
    port = free_port()
    command = [sys.executable, "-m", "baton_cli", "up", "--model", str(folder), "--port", str(port)]
    threads = {"BATON_NUM_THREADS": str(len(os.sched_getaffinity(0))), "BATON_ENGINES_SHARING_CPU": "1"}
    command += ["--no-enable-prefix-caching", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **threads})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} did not become ready") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def token_times(url: str, prompt: list[int], max_tokens: int) -> list[float]:
    """Return the seconds from sending a request to each of its tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    start = time.perf_counter()
    times = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                count = len(json.loads(line[6:])["choices"][0].get("token_ids") or [])
                times += [time.perf_counter() - start] * count
    return times


def bench_handover(folder: Path, repeats: int) -> dict[str, float]:
    """Return TTFT of a lone long prompt, aggregated and through P/D, in turns on the same machine, and the part of
    the transfer that the client sees: how much longer the second token takes than the later ones."""
    common = ("--served-model-name", "model")
    ttft: dict[str, list[float]] = {"aggregated": [], "pd": []}
    exposed = []
    with served(folder, *common, "--aggregated") as aggregated, served(folder, *common) as pd:
        for index in range(-2, repeats):
            for name, url in (("aggregated", aggregated), ("pd", pd)):
                [prompt] = random_prompts(1, LONG_PROMPT)
                times = token_times(url, prompt, 16)
                if index < 0:
                    continue
                ttft[name].append(times[0])
                if name == "pd":
                    gaps = [after - before for before, after in itertools.pairwise(times)]
                    exposed.append(max(gaps[0] - statistics.median(gaps[1:]), 0.0))
    return {
        "ttft_aggregated": statistics.median(ttft["aggregated"]),
        "ttft_pd": statistics.median(ttft["pd"]),
        "exposed_transfer": statistics.median(exposed),
    }


def rows(times: dict[str, float]) -> list[dict[str, Any]]:
    """Return the table: what was measured, Baton's seconds, the other's, how many times faster, and the goal."""
    lone_limit = 1.15 + times["exposed_transfer"] / times["ttft_aggregated"]
    table = [
        ("16 x 256 in, 64 out, against generate one at a time", "baton_16", "generate_one_at_a_time_16", 3.0),
        ("16 x 256 in, 64 out, against generate in one batch", "baton_16", "generate_batch_16", 1.2),
        ("1 x 256 in, 64 out, against generate", "baton_1", "generate_1", 1.0),
        ("TTFT of a lone 1,024-token prompt, P/D against aggregated", "ttft_pd", "ttft_aggregated", 1 / lone_limit),
    ]
    return [
        {
            "row": name,
            "baton_s": times[ours],
            "other_s": times[other],
            "ratio": times[other] / times[ours],
            "goal": goal,
        }
        for name, ours, other, goal in table
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/cpu_bench.json"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        times = bench_generation(model, folder, arguments.repeats)
        del model
        times |= bench_handover(folder, arguments.repeats)
    table = rows(times)
    print(f"Llama shape, 100 M parameters, float32, {threads} threads, torch {torch.__version__}")
    for row in table:
        print(f"{row['row']:<60} {row['baton_s']:8.3f} s {row['other_s']:8.3f} s {row['ratio']:6.2f} x", end=" ")
        print(f"(goal {row['goal']:.2f})")
    print(f"transfer seen by the client: {times['exposed_transfer'] * 1e3:.1f} ms")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"threads": threads, "torch": torch.__version__, "seconds": times, "rows": table}
    arguments.out.write_text(json.dumps(report, indent=1))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
