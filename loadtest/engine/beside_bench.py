"""What requests with a grammar, or with logprobs of their prompt, cost the requests that decode beside them.

64 requests decode at a time, with prompts of 512 random tokens. Each case has another sampling for some of them. The
table shows the time between two tokens of the other requests. It also shows the ratio of that time to the time of the
case before the colon in the name. All cases alternate within each round; a figure is the median of the rounds.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.sampling import Grammar, GrammarKind, SamplingParams
from baton_engine.sequence import FinishReason, Request
from loadtest.common.bench_table import aligned
from loadtest.common.random_model import write_random_model

REQUESTS, PROMPT_TOKENS, BRIEF_TOKENS = 64, 512, 64
# No output in this benchmark is long enough to complete this schema.
_SCHEMA = {
    "type": "object",
    "properties": {"notes": {"type": "array", "items": {"type": "string"}, "minItems": 10_000}},
    "required": ["notes"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))


class Case:
    """usual: the sampling of most requests. odd: that of one more request, which is sent again whenever it ends."""

    def __init__(self, name: str, usual: SamplingParams, odd: SamplingParams | None = None) -> None:
        self.name, self.usual, self.odd = name, usual, odd


def cases(tokens: int) -> list[Case]:
    """Return all cases. tokens: how many most requests generate."""
    plain = SamplingParams(max_tokens=tokens, temperature=0.6)
    schema = SamplingParams(max_tokens=tokens, temperature=0.6, grammar=GRAMMAR)
    brief = SamplingParams(max_tokens=BRIEF_TOKENS, temperature=0.6)
    with_prompt = SamplingParams(max_tokens=BRIEF_TOKENS, temperature=0.6, prompt_logprobs=5)
    return [
        Case("plain", plain),
        Case("plain: a schema for all", schema),
        Case("plain: a schema for one", plain, schema),
        Case("brief one", plain, brief),
        Case("brief one: with logprobs of its prompt", plain, with_prompt),
    ]


class Bench:
    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._highest = min(30_000, vocab_size - 1)
        self._ids = itertools.count(1)
        self._random = random.Random(0)

    def run(self, case: Case) -> tuple[float, float]:
        """Return the median and the 99th percentile of the time between two tokens of the usual requests, in ms."""
        usual = {self._add(case.usual) for _ in range(REQUESTS - (case.odd is not None))}
        odd = self._add(case.odd) if case.odd else None
        came: dict[int, float] = {}
        counts: Counter[int] = Counter()
        gaps: list[float] = []
        while usual:
            result = self._engine.step()
            now = time.perf_counter()
            if result.rejections:
                raise RuntimeError(str(result.rejections[0]))
            for delta in result.deltas:
                if delta.id in usual and delta.tokens:
                    counts[delta.id] += len(delta.tokens)
                    # The first tokens come while prompts of others are still computed.
                    if counts[delta.id] > case.usual.max_tokens // 4:
                        gaps.append(now - came[delta.id])
                    came[delta.id] = now
                if delta.finish_reason:
                    if delta.finish_reason is not FinishReason.LENGTH:
                        raise RuntimeError(f"a request of {case.name!r} ended early: {delta.finish_reason.name}")
                    usual.discard(delta.id)
                    if delta.id == odd and case.odd:
                        odd = self._add(case.odd)
        if odd is not None:
            self._engine.abort(odd)
        while self._engine.has_work:
            self._engine.step()
        return statistics.median(gaps) * 1e3, statistics.quantiles(gaps, n=100)[98] * 1e3

    def _add(self, sampling: SamplingParams) -> int:
        id = next(self._ids)
        prompt = [self._random.randint(10, self._highest) for _ in range(PROMPT_TOKENS)]
        request = Request(id=id, prompt=prompt, sampling=sampling)
        error = self._engine.request_error(request)
        if error is not None:
            raise RuntimeError(str(error))
        self._engine.add(request)
        return id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a folder with a config.json; weights are random")
    parser.add_argument("--weights-dir", type=Path, help="where random weights stay for the next run")
    parser.add_argument("--tokens", type=int, default=400, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.weights_dir or Path(scratch)) / arguments.shape.name
        model = write_random_model(folder, (arguments.shape / "config.json").read_text(), seed=0)
        config = EngineConfig(
            model=str(folder),
            dtype=arguments.dtype,
            max_model_len=4096,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            chunk_ms=0.0,
        )
        bench, all_cases = Bench(Engine(config), model.vocab_size), cases(arguments.tokens)
        # The first round warms up.
        rounds = [{case.name: bench.run(case) for case in all_cases} for _ in range(arguments.rounds + 1)][1:]
    lines = [["ms between tokens of the others", "p50", "ratio", "lowest to highest", "p99"]]
    for case in all_cases:
        before = case.name.partition(":")[0]
        ratios = [figures[case.name][0] / figures[before][0] for figures in rounds]
        p50, p99 = (statistics.median(figures[case.name][index] for figures in rounds) for index in range(2))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        lines.append([case.name, f"{p50:.3f}", f"{statistics.median(ratios):.3f}", spread, f"{p99:.3f}"])
    print(aligned(lines, 1))


if __name__ == "__main__":
    main()
