"""Tens of thousands of short requests of every kind through the engine in this process, many of them broken off.

Afterwards nothing may be left behind: no block held, every count right, device and host memory no larger than halfway
through, and greedy answers the same tokens as before. The exit code is 1 when anything is wrong. The seed that it
prints, given as --seed, sends the same requests. Requests are aborted after a number of steps, never after a time.
"""

import argparse
import gc
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_engine.config import EngineConfig
from baton_engine.delta import Delta
from baton_engine.engine import Engine
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import FinishReason, Request
from loadtest.common.random_weights import write_random_weights

WINDOWS = 10
IN_FLIGHT = 64
MOST_PROMPT, MOST_OUTPUT, LONG_OUTPUT, WAVE = 160, 24, 90, 100
# A small pool, so that cached blocks are evicted all the time.
NUM_BLOCKS, BLOCK_SIZE = 128, 16
ABORTED = 0.2
PROBE_LENGTHS = (1, 2, 15, 16, 17, 40, 64, 100, 159)
IDLE_STEPS = 1000
MIB = 1 << 20
# The growth that the second half of the windows may have in all. Allocators grow in jumps; a leak grows steadily.
ALLOWED_GROWTH = {"host": 64 * MIB, "allocated": MIB, "reserved": 64 * MIB, "device": 64 * MIB}
STEADY_GROWTH = 256 << 10


class SoakError(Exception):
    """A violated invariant of the engine."""


def check(condition: object, message: str) -> None:
    if not condition:
        raise SoakError(message)


def make_model(folder: Path, seed: int, large: bool) -> None:
    """Write a random model, wide enough in its weights that greedy answers do not settle on one token."""
    hidden, layers, dim, vocab = (512, 4, 64, 4096) if large else (64, 2, 16, 512)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_random_weights(folder, seed, std=2 / math.sqrt(hidden))


@dataclass
class Visit:
    """A running request: its outputs by choice, and the number of engine steps after which it is aborted (None: never).

    whole: True aborts the whole request; False aborts one of its choices, as soon as the choice has a token.
    """

    request: Request
    steps_to_abort: int | None
    whole: bool
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def take(self, delta: Delta) -> None:
        sampling, name = self.request.sampling, f"request {self.request.id}, choice {delta.choice}"
        tokens = self.outputs.setdefault(delta.choice, [])
        check(delta.choice < sampling.n and delta.choice not in self.ended, f"{name} was not to go on")
        check(delta.offset == len(tokens), f"{name} has {len(tokens)} tokens and gets one for {delta.offset}")
        tokens += delta.tokens
        allowed = sampling.allowed_token_ids
        check(not allowed or set(delta.tokens) <= set(allowed), f"{name} has a token that is not allowed")
        wanted = len(delta.tokens) if sampling.logprobs is not None else 0
        check(len(delta.logprobs) == wanted, f"{name} has {len(delta.logprobs)} logprobs, not {wanted}")
        if delta.finish_reason:
            self._end(delta, tokens, name)

    def _end(self, delta: Delta, tokens: list[int], name: str) -> None:
        self.ended.add(delta.choice)
        sampling = self.request.sampling
        if delta.finish_reason is FinishReason.LENGTH:
            check(len(tokens) == sampling.max_tokens, f"{name} ends after {len(tokens)} of {sampling.max_tokens}")
            return
        stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        right = tokens[-1] in stops and len(tokens) >= sampling.min_tokens
        check(delta.finish_reason is FinishReason.STOP and right, f"{name} ends for no reason: {delta.finish_reason!r}")

    @property
    def over(self) -> bool:
        return len(self.ended) == self.request.sampling.n


class Soak:
    """The requests that one engine is loaded with."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._vocab = engine.model.vocab_size
        self._ids = itertools.count()
        self._visits: dict[int, Visit] = {}
        # Many prompts share a prefix, so that cached blocks are shared and reused.
        self._openings = [self._tokens(length) for length in (16, 40, 64, 100)]
        self.counts: Counter[str] = Counter()

    def visit(self, count: int) -> None:
        """Send this number of requests, IN_FLIGHT at a time, and step until all have ended."""
        idle = 0
        while count or self._visits:
            while count and len(self._visits) < IN_FLIGHT:
                self._send()
                count -= 1
            result = self._engine.step()
            idle = 0 if result.progress else idle + 1
            check(idle < IDLE_STEPS, f"{len(self._visits)} requests wait and nothing happens")
            for delta in result.deltas:
                self._take(delta)
            self._abort_due()
        while self._engine.has_work:
            check(not self._engine.step().deltas, "tokens come for a request that is over")

    def probe(self) -> list[list[int]]:
        """Return greedy answers to prompts that are always the same, each alone in the engine, with an empty cache."""
        answers, pool = [], self._engine.pool
        for index, length in enumerate(PROBE_LENGTHS):
            pool.release(pool.allocate(pool.num_available))
            prompt = random.Random(index).choices(range(self._vocab), k=length)
            self._engine.add(Request(id=next(self._ids), prompt=prompt, sampling=SamplingParams(max_tokens=64)))
            answer: list[int] = []
            while self._engine.has_work:
                for delta in self._engine.step().deltas:
                    answer += delta.tokens
            answers.append(answer)
        return answers

    def check_idle(self) -> None:
        load = self._engine.load()
        held = load.running, load.waiting, load.blocks_held
        check(held == (0, 0, 0), f"idle, but running, waiting and blocks held are {held}")
        self._engine.check_integrity()

    def _send(self) -> None:
        rng, id = self._rng, next(self._ids)
        # A wave of short prompts with long outputs outgrows the pool after its admission, which brings preemptions.
        wave = id // WAVE % 5 == 0
        prompt = self._tokens(rng.randint(1, MOST_OUTPUT)) if wave else self._prompt()
        count = rng.randint(MOST_OUTPUT, LONG_OUTPUT) if wave else rng.randint(1, MOST_OUTPUT)
        request = Request(id=id, prompt=prompt, sampling=self._sampling(count))
        error = self._engine.request_error(request)
        check(error is None, f"request {id} is refused: {error}")
        steps_to_abort = rng.randrange(2 * MOST_OUTPUT) if rng.random() < ABORTED else None
        self._visits[id] = Visit(request, steps_to_abort, whole=rng.random() < 0.8)
        self._engine.add(request)

    def _take(self, delta: Delta) -> None:
        visit = self._visits.get(delta.id)
        check(visit is not None, f"a token comes for request {delta.id}, which is over")
        assert visit is not None
        visit.take(delta)
        self.counts["tokens"] += len(delta.tokens)
        if visit.over:
            del self._visits[delta.id]
            self.counts["finished"] += 1

    def _abort_due(self) -> None:
        """Abort the requests and choices whose steps_to_abort have passed."""
        for id, visit in list(self._visits.items()):
            if visit.steps_to_abort is None:
                continue
            visit.steps_to_abort -= 1
            if visit.steps_to_abort >= 0:
                continue
            if visit.whole:
                self._engine.abort(id)
                self.counts["aborted"] += 1
                del self._visits[id]
            elif visit.outputs:
                # A choice exists only from its first token on.
                choice = self._rng.choice([choice for choice in visit.outputs if choice not in visit.ended])
                self._engine.abort(id, choice)
                self.counts["choices aborted"] += 1
                visit.ended.add(choice)
                visit.steps_to_abort = None
                if visit.over:
                    del self._visits[id]

    def _prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.5:
            return self._tokens(rng.randint(1, MOST_PROMPT))
        opening = rng.choice(self._openings)
        return opening + self._tokens(rng.randint(0, MOST_PROMPT - len(opening)))

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab), k=count)

    def _sampling(self, count: int) -> SamplingParams:
        """Return sampling parameters for at most this many tokens. Most requests set few of them, and some set many."""
        rng = self._rng
        fields: dict[str, Any] = {"max_tokens": count, "n": rng.choice([1, 1, 1, 2, 3]), "seed": rng.getrandbits(64)}
        fields["temperature"] = rng.choice([0.0, 0.6, 0.6, 1.0, 1.5])
        rare: dict[str, Any] = {
            "top_k": rng.randint(1, 50),
            "top_p": rng.uniform(0.5, 0.99),
            "min_p": rng.uniform(0.01, 0.2),
            "presence_penalty": rng.uniform(-1, 1),
            "frequency_penalty": rng.uniform(-1, 1),
            "repetition_penalty": rng.uniform(0.8, 1.3),
            "logit_bias": {token: rng.uniform(-5, 5) for token in self._tokens(3)},
            "allowed_token_ids": self._tokens(20),
            "bad_words": [self._tokens(2)],
            "stop_token_ids": self._tokens(self._vocab // 20),
            "eos_token_ids": [rng.randrange(self._vocab)],
            "min_tokens": rng.randint(0, count),
            "logprobs": rng.randint(0, 5),
            "prompt_logprobs": rng.randint(0, 3),
        }
        # Each of them makes other requests' steps slower too, so half of all requests have none.
        if rng.random() < 0.5:
            fields |= {name: value for name, value in rare.items() if rng.random() < 0.15}
        return SamplingParams(**fields)


def memory(on_gpu: bool) -> dict[str, int]:
    """Return bytes by kind: of the process in main memory; of torch's tensors, of torch, and of all on the device."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if on_gpu:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        sizes |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        sizes["device"] = total - free
    return sizes


def check_memory(windows: list[dict[str, int]]) -> None:
    """Raise SoakError when a kind of memory grows all along, or by more than it may, in the second half."""
    half = windows[len(windows) // 2 :]
    for kind in half[0]:
        steps = [after[kind] - before[kind] for before, after in itertools.pairwise(half)]
        shown = ", ".join(f"{step / MIB:+.2f}" for step in steps)
        check(sum(steps) <= ALLOWED_GROWTH[kind], f"{kind} memory grows, in MiB by window: {shown}")
        check(not steps or min(steps) <= STEADY_GROWTH, f"{kind} memory grows with every window, in MiB: {shown}")


def soak(engine: Engine, requests: int, seed: int, on_gpu: bool) -> None:
    """Run the whole soak test. Raises SoakError."""
    visitors = Soak(engine, seed)
    before = visitors.probe()
    check(visitors.probe() == before, "the same prompts have other greedy answers the second time, before anything")
    windows = []
    began = time.perf_counter()
    for window in range(WINDOWS):
        visitors.visit(requests * (window + 1) // WINDOWS - requests * window // WINDOWS)
        visitors.check_idle()
        windows.append(memory(on_gpu))
        sizes = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in windows[-1].items())
        print(f"[{time.perf_counter() - began:6.1f} s] window {window + 1} of {WINDOWS}: MiB {sizes}", flush=True)
    took = time.perf_counter() - began
    load = engine.load()
    print(f"{dict(visitors.counts)}, {load.preemptions} preemptions, {load.prefix_hits} of", end=" ")
    print(f"{load.prefix_queries} prompt tokens found in the cache")
    print(f"{requests / took:.0f} requests/s, {visitors.counts['tokens'] / took:,.0f} tokens/s")
    check(visitors.probe() == before, "greedy answers are not what they were at the beginning")
    visitors.check_idle()
    check_memory(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--seed", type=int, help="drawn unless given")
    parser.add_argument("--model", type=Path, help="a model folder; a small random one unless given")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    # On CPU these caches grow with every new shape, by hundreds of MiB, which would hide a leak.
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "16")
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"seed {seed}, {arguments.requests} requests, {device}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.model or Path(name)
        if arguments.model is None:
            make_model(folder, 0, on_gpu)
        config = EngineConfig(
            model=str(folder),
            max_model_len=256,
            max_num_seqs=48,
            max_num_batched_tokens=256,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            enforce_eager=arguments.enforce_eager,
            num_threads=1,
        )
        engine = Engine(config)
    try:
        soak(engine, arguments.requests, seed, on_gpu)
    except (SoakError, RuntimeError) as error:
        sys.exit(f"FAILED with seed {seed}: {error}")
    print("passed")


if __name__ == "__main__":
    main()
