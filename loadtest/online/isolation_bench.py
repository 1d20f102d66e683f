"""What a tenant that floods the stack with long prompts costs another one that sends short ones: A's TTFT beside B's.

Usage: isolation_bench.py [SHAPE_DIR] [--out FILE]. `baton up` with a prefill and a decode pod, and two tenants of equal
weight. Tenant A sends short prompts at random (Poisson): alone, while B sends as many tokens in prompts as short as
A's, and while it does so in long ones; and so on in turns, because a machine that others use is not equally fast all
the time. Before each round and after the last, the benchmark measures the prefill rate of the stack in tokens a second;
the rates of both tenants are shares of it. Weights are random (without a shape, those of a small model), prompts are
random, and prefix caches are off. TTFT counts from the scheduled send time of a request.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_bench.answer import Answer
from baton_gateway.tenancy.keys import Key, make_key
from loadtest.common.bench_table import aligned, figure
from loadtest.common.client import Load, drive
from loadtest.common.job import Json
from loadtest.common.random_model import write_random_model
from loadtest.common.servers import HOST, Server, setting

# Small enough for 2 cores to compute a hundred short prompts a round: with fewer, a p99 is an accident. Wide enough for
# products to be most of the work, as in real models: where attention is, a step deep in a long prompt takes longer.
SMALL_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
OUTPUTS = 4
GOAL = 1.2  # highest allowed ratio of A's p99 TTFT beside B's long prompts to A's p99 without them
PHASES = ("alone", "alike", "long")  # A alone, beside B with short prompts, beside B with long prompts


class Bench:
    """The measurement rounds on a running server."""

    def __init__(self, arguments: argparse.Namespace, port: int, vocab: int, keys: dict[str, str]) -> None:
        """keys: the API keys of tenants A and B."""
        self._arguments, self._port, self._vocab, self._keys = arguments, port, vocab, keys
        self._seed = arguments.seed

    async def run(self) -> Json:
        a = self._arguments
        await self._prefill_rate()  # warm-up: code is compiled and memory allocated at first use
        rate = await self._prefill_rate()
        rounds = []
        for number in range(a.rounds):
            # Arrivals are the same in all phases, so only B's load differs.
            self._seed = a.seed + number
            result = await self._round(rate)
            before, rate = rate, await self._prefill_rate()
            result["prefill_tok_s"] = (before + rate) / 2
            # The machine may now be faster or slower than during the calibration.
            result["load"] = (a.share + a.flood_share) * before / result["prefill_tok_s"]
            rounds.append(result)
            print(row(result), flush=True)
        return {"rounds": rounds, "median": medians(rounds), "together": together(rounds)}

    async def _round(self, rate: float) -> Json:
        """rate: the prompt tokens a second that the stack can compute."""
        a = self._arguments
        calm = self._load("a", a.short, a.share * rate, a.seconds)
        answers, others = {"alone": await self._drive(calm, "A")}, {}
        for phase, tokens in (("alike", a.short), ("long", a.long)):
            lead = a.seconds / 5
            flood = self._load("b", tokens, a.flood_share * rate, a.seconds + lead)
            flooding = asyncio.create_task(self._drive(flood, "B"))
            await asyncio.sleep(lead)
            answers[phase] = await self._drive(calm, "A")
            others[phase] = await flooding
        return {"a_req_s": calm.rate, "b_asked_req_s": flood.rate, **figures(answers, others)}

    @staticmethod
    def _load(name: str, tokens: int, tokens_s: float, seconds: float) -> Load:
        rate = tokens_s / tokens
        return Load(name, "", tokens, OUTPUTS, max(round(rate * seconds), 2), rate)

    async def _prefill_rate(self) -> float:
        """Return the tokens a second of long prompts; one prompt waits while another is computed."""
        load = Load("rate", "", self._arguments.long, 1, self._arguments.calibration, concurrency=2)
        answers = await self._drive(load, "B")
        if failed := [f"{answer.error}: {answer.detail}" for answer in answers if answer.error]:
            raise RuntimeError(f"the rate cannot be measured: {failed[0]}")
        span = max(answer.end for answer in answers) - min(answer.due for answer in answers)
        return load.inputs * load.count / span

    async def _drive(self, load: Load, tenant: str) -> list[Answer]:
        return await drive(HOST, self._port, load, self._seed, self._vocab, self._keys[tenant])


def figures(answers: dict[str, list[Answer]], others: dict[str, list[Answer]]) -> Json:
    """Return the figures of a round by phase; times in ms. answers: to tenant A. others: to tenant B."""
    times = {phase: ttfts(answers[phase]) for phase in PHASES}
    result: Json = {**compared(times), "ttfts": times}
    flood = others["long"]
    good = [answer for answer in flood if not answer.error]
    span = max((answer.end for answer in good), default=0.0) - min(answer.due for answer in flood)
    result["b_req_s"] = len(good) / span if good else 0.0
    result["b_ttft"] = percentiles(ttfts(flood))
    result["failed"] = {
        tenant: sum(bool(answer.error) for phase in of.values() for answer in phase)
        for tenant, of in (("A", answers), ("B", others))
    }
    return result


def ttfts(answers: Sequence[Answer]) -> list[float]:
    return [answer.ttft * 1e3 for answer in answers if answer.ttft is not None and not answer.error]


def compared(times: dict[str, list[float]]) -> Json:
    """Return the percentiles of each phase, and the ratios of those beside long prompts to the others."""
    result: Json = {phase: percentiles(times[phase]) for phase in PHASES}
    for phase in PHASES[:2]:
        result[f"to_{phase}"] = {name: result["long"][name] / result[phase][name] for name in ("p50", "p99")}
    return result


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": float("nan"), "p99": float("nan")}
    return {f"p{p}": sorted(values)[min(len(values) * p // 100, len(values) - 1)] for p in (50, 99)}


def together(rounds: Sequence[Json]) -> Json:
    """Return the percentiles over the requests of all rounds, because a p99 of one round depends on a few requests."""
    return compared({phase: [value for r in rounds for value in r["ttfts"][phase]] for phase in PHASES})


def medians(rounds: Sequence[Json]) -> Json:
    """Return the median of each figure over the rounds."""
    return {
        key: {name: statistics.median(r[key][name] for r in rounds) for name in value}
        if isinstance(value, dict)
        else statistics.median(r[key] for r in rounds)
        for key, value in rounds[0].items()
        if key != "ttfts"
    }


def row(result: Json) -> str:
    times = (f"{phase} {figure(result[phase]['p50'])} / {figure(result[phase]['p99'])} ms" for phase in PHASES)
    ratios = (f"to {phase} {ratio(result, phase)}" for phase in PHASES[:2])
    return (
        f"A {', '.join(times)}; {', '.join(ratios)}; B {result['b_req_s']:.2f} req/s; "
        f"{figure(result['prefill_tok_s'])} tok/s, load {result['load']:.0%}"
    )


def ratio(result: Json, phase: str) -> str:
    return " / ".join(f"{value:.2f}" for value in result[f"to_{phase}"].values())


def table(report: Json) -> str:
    median, all_of_a = report["median"], report["together"]
    lines = [["TTFT of A, all rounds together", "p50 ms", "p99 ms"]]
    lines += [[phase, *map(figure, all_of_a[phase].values())] for phase in PHASES]
    text = aligned(lines, 1)
    for phase in PHASES[:2]:
        text += f"\nlong to {phase}: {ratio(all_of_a, phase)}"
    text += f"\n\nload {median['load']:.0%} of {figure(median['prefill_tok_s'])} prompt tokens a second"
    text += f"\nB: {median['b_req_s']:.2f} of {median['b_asked_req_s']:.2f} req/s, first token after "
    text += " / ".join(figure(value) for value in median["b_ttft"].values()) + " ms"
    failed = {tenant: sum(r["failed"][tenant] for r in report["rounds"]) for tenant in "AB"}
    text += f"\nfailed: A {failed['A']}, B {failed['B']}"
    kept = {phase: "yes" if all_of_a[f"to_{phase}"]["p99"] <= GOAL else "no" for phase in PHASES[:2]}
    return text + f"\np99 of A moves by at most {GOAL - 1:.0%}: {kept['alike']}; to that alone: {kept['alone']}"


def write_tenants(path: Path) -> dict[str, str]:
    """Write the file of two tenants of equal weight; returns their keys by name."""
    made = {tenant: make_key(tenant) for tenant in "AB"}
    keys = [_entry(key) for _, key in made.values()]
    path.write_text(json.dumps({"tenants": {tenant: {"weight": 1} for tenant in made}, "keys": keys}))
    return {tenant: text for tenant, (text, _) in made.items()}


def _entry(key: Key) -> Json:
    return {"id": key.id, "hash": key.hash, "tenant": key.tenant}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR", nargs="?")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("loadtest/out/isolation_bench.json"),
        help="report file; the log is written beside it",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=18.0, help="duration of A's arrivals, three times a round")
    parser.add_argument("--calibration", type=int, default=5, help="long prompts by which the prefill rate is measured")
    parser.add_argument("--short", type=int, default=1024, help="tokens of A's prompts")
    parser.add_argument("--long", type=int, default=4000, help="tokens of B's prompts")
    parser.add_argument("--share", type=float, default=0.3, help="A's share of the prefill rate")
    parser.add_argument("--flood-share", type=float, default=0.5, help="B's share of the prefill rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads of each engine; without it the engine chooses")
    parser.add_argument(
        "--set", dest="settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag of `baton up`, such as max_num_batched_tokens=128; others by BATON_… in the environment",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-isolation-") as name:
        folder = Path(name)
        config = json.dumps(SMALL_SHAPE) if arguments.shape is None else (arguments.shape / "config.json").read_text()
        vocab = write_random_model(folder, config, arguments.seed).vocab_size
        keys = write_tenants(folder / "tenants.json")
        os.environ["BATON_TENANTS_FILE"] = str(folder / "tenants.json")
        if arguments.threads is not None:
            os.environ["BATON_NUM_THREADS"] = str(arguments.threads)
        settings = {"enable_prefix_caching": False, **dict(arguments.settings)}
        with Server("ours-pd", folder, settings, arguments.out.with_suffix(".log")) as server:
            report = asyncio.run(Bench(arguments, server.port, vocab, keys).run())
    print(f"\n{table(report)}\n")
    arguments.out.write_text(json.dumps({"settings": settings, **report}, indent=1))


if __name__ == "__main__":
    main()
