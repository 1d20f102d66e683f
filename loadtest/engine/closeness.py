"""Compares greedy tokens of the engine with those of Hugging Face transformers, for every family and configuration.

The weights are random and exact in bfloat16. Prompts of mixed lengths are answered at the same time, with and without
CUDA graphs, with and without the prefix cache, with prompts in chunks and whole. For each token of an answer,
transformers then computes the logits in float32 from the prompt and the engine's tokens before it. So the tokens after
a first difference are checked as well.

float32: each token must be the one with the highest logit. Where two experts have nearly the same score, the order of
a sum decides which of them computes a token, and that changes logits by more than rounding does. So a token may also
be the best of transformers after each embedding was changed by about NUDGE of itself, in one of NUDGES ways. Few
tokens may need that: MOST_TIED of all.
bfloat16: two checks. Let `noise` be the largest difference between transformers' logprobs in bfloat16 and in float32,
over all answers and the CANDIDATES best tokens at each place. Rounding can swap two candidates whose logprobs are at
most 2 * noise apart, so the engine's token may be behind the best one by FACTOR = 2 times noise, in float32. Against
errors that are small but many, the number of tokens that differ from the best in float32 is limited too: to FACTOR
times the number for transformers' own bfloat16, plus MARGIN of all tokens.
Both: of the tokens of an answer, at least VARIED must be different ones on average. A model that repeats itself gives
the same answers with most errors.

The exit code is 1 if a check fails. The prompts, and so the answers, depend only on --seed.
"""

import argparse
import contextlib
import gc
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request
from loadtest.engine.random_families import FAMILIES, REAL, TINY, tiny_heads
from loadtest.engine.random_model import make_model, model_class

FACTOR = 2.0
CANDIDATES = 16  # logits near a softcap have many that rounding can swap, but only some have large errors
MARGIN = 0.02
NUDGE, NUDGES = 2e-6, 8  # float32 has a precision of 6e-8, and each layer adds some errors of that size
MOST_TIED = 0.003
VARIED = 0.1
BLOCK_SIZE = 64 if torch.cuda.is_available() else 16  # the engine's own default
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Tokens = list[int]


@dataclass(frozen=True)
class Way:
    """One configuration of the engine."""

    graphs: bool
    cache: bool
    chunked: bool

    def __str__(self) -> str:
        names = [("eager", "graphs"), ("no cache", "cache"), ("whole", "chunked")]
        picked = zip(names, (self.graphs, self.cache, self.chunked), strict=True)
        return ", ".join(pair[flag] for pair, flag in picked)


def ways(on_gpu: bool) -> list[Way]:
    return [Way(*flags) for flags in itertools.product([True, False] if on_gpu else [False], *[[False, True]] * 2)]


@dataclass(frozen=True)
class Noise:
    """The effect of bfloat16 on transformers itself: the largest change of a candidate's logprob, and how many best
    tokens change."""

    largest: float
    changed: float  # share of all best tokens that change


@dataclass
class Verdict:
    """A verdict on all answers. worst: the largest gap between the best token's logprob and the engine's.

    tied: tokens that are not the best, but are the best after a small change of the embeddings. different: the sum of
    how many different tokens each answer has.
    """

    noise: Noise
    tokens: int = 0
    equal: int = 0
    tied: int = 0
    different: int = 0
    answers: int = 0
    diverged: int = 0
    worst: float = 0.0

    @property
    def good(self) -> bool:
        if self.different < VARIED * self.tokens:
            return False
        if not self.noise.largest:
            return self.equal + self.tied == self.tokens > 0 and self.tied <= MOST_TIED * self.tokens
        most = (FACTOR * self.noise.changed + MARGIN) * self.tokens
        return self.worst <= FACTOR * self.noise.largest and self.tokens - self.equal <= most

    def __str__(self) -> str:
        text = f"{self.equal} of {self.tokens} tokens equal, {self.diverged} of {self.answers} answers diverge"
        if self.different < VARIED * self.tokens:
            text += ", but the model repeats itself and shows little"
        if self.tied:
            text += f", {self.tied} tied"
        if self.worst:
            text += f", worst gap {self.worst:.4f}"
        if self.noise.largest:
            text += f" of {FACTOR * self.noise.largest:.4f}; bfloat16 changes {self.noise.changed:.1%} of theirs,"
            text += f" {1 - self.equal / self.tokens:.1%} of ours"
        return text


class Reference:
    """transformers' model of a folder, which says how probable each next token is. A folder whose family transformers
    lacks has the same weights in a family that it knows, in the subfolder `reference`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        known = folder / "reference"
        known = known if known.exists() else folder
        # In transformers 5.17, attention by torch leaves out the softcap, and is the default also for Gemma 2.
        config = transformers.AutoConfig.from_pretrained(known)
        softcap = getattr(config, "attn_logit_softcapping", None)
        attention = "eager" if softcap else None
        model = model_class(config).from_pretrained(known, dtype=dtype, attn_implementation=attention)
        self._model: Any = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def logprobs(self, prompt: Tokens, answer: Tokens) -> torch.Tensor:
        """Return [len(answer), vocab] float32: of each token of the answer, given all before it."""
        ids = torch.tensor([prompt + answer[:-1]], device=self._device)
        logits = self._model(ids, logits_to_keep=len(answer)).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.inference_mode()
    def nudged_tokens(self, prompt: Tokens, answer: Tokens, seed: int) -> Tokens:
        """Return the best token instead of each of the answer's, when all embeddings are slightly changed."""
        embeddings = self._model.get_input_embeddings()(torch.tensor([prompt + answer[:-1]], device=self._device))
        generator = torch.Generator(self._device).manual_seed(seed)
        changes = torch.randn(embeddings.shape, generator=generator, device=self._device)
        nudged = embeddings * (1 + NUDGE * changes)
        return self._model(inputs_embeds=nudged, logits_to_keep=len(answer)).logits[0].argmax(dim=1).tolist()


def make_prompts(count: int, longest: int, vocab_size: int, seed: int) -> list[Tokens]:
    """Return prompts of mixed lengths, those around block boundaries among them; every other one begins alike."""
    rng = random.Random(seed)
    lengths = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, longest]
    lengths += [rng.randint(1, longest) for _ in range(count - len(lengths))]
    opening = rng.choices(range(vocab_size), k=longest // 2)
    prompts = []
    for index, length in enumerate(lengths[:count]):
        start = opening[: length - 1] if index % 2 else []
        prompts.append(start + rng.choices(range(vocab_size), k=length - len(start)))
    return prompts


def answer_all(
    folder: Path, prompts: list[Tokens], length: int, dtype: str, way: Way, division: dict[str, Any]
) -> Iterator[list[Tokens]]:
    """Yield the engine's answers to all prompts, a second time from the prefix cache if there is one."""
    longest = max(map(len, prompts)) + length
    settings = {"enforce_eager": not way.graphs, "enable_prefix_caching": way.cache, "dtype": dtype}
    # Fewer concurrent sequences than prompts, so that a step has both prefills and decodes.
    most = max(len(prompts) // 2, 1)
    config = EngineConfig(
        model=str(folder),
        block_size=BLOCK_SIZE,
        num_blocks=len(prompts) * -(-longest // BLOCK_SIZE) * 2,
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=48 if way.chunked else len(prompts) * longest,
        num_threads=torch.get_num_threads(),
        **division,
        **settings,
    )
    engine = Engine(config)
    with contextlib.closing(engine.runner):
        for _ in range(2 if way.cache else 1):
            for id, prompt in enumerate(prompts):
                engine.add(Request(id=id, prompt=prompt, sampling=SamplingParams(max_tokens=length)))
            answers: list[Tokens] = [[] for _ in prompts]
            while engine.has_work:
                for delta in engine.step().deltas:
                    answers[delta.id] += delta.tokens
            engine.check_integrity()
            yield answers


class Family:
    """One model, its prompts, and the logprobs that transformers gives to answers."""

    def __init__(self, folder: Path, prompts: list[Tokens], length: int, device: str, division: dict[str, Any]) -> None:
        self._division = division
        self._folder, self._prompts, self._length, self._device = folder, prompts, length, device
        self._reference = Reference(folder, torch.float32, device)
        self._judged: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}
        self._noise: Noise | None = None

    def judge(self, dtype: str, way: Way) -> Verdict:
        """Run the engine in one configuration. Errors of the engine propagate."""
        verdict = Verdict(Noise(0.0, 0.0))
        for answers in answer_all(self._folder, self._prompts, self._length, dtype, way, self._division):
            if dtype == "bfloat16":
                verdict.noise = self._bfloat16_noise(answers)
            for index, answer in enumerate(answers):
                equal, gap = self._judge_one(index, answer)
                verdict.tokens += self._length
                verdict.equal += equal
                if dtype == "float32" and equal < self._length:
                    verdict.tied += self._count_tied(index, answer)
                verdict.different += len(set(answer))
                verdict.answers += 1
                verdict.diverged += equal < self._length
                verdict.worst = max(verdict.worst, gap)
        return verdict

    def _judge_one(self, index: int, answer: Tokens) -> tuple[int, float]:
        """Return how many tokens are the reference's own, and the largest gap of the others."""
        if len(answer) != self._length:
            raise RuntimeError(f"prompt {index} got {len(answer)} tokens, not {self._length}")
        key = index, tuple(answer)
        if key not in self._judged:
            logprobs = self._reference.logprobs(self._prompts[index], answer)
            chosen = logprobs.gather(1, torch.tensor(answer, device=self._device).unsqueeze(1)).squeeze(1)
            gaps = logprobs.max(dim=1).values - chosen
            same = logprobs.argmax(dim=1).cpu() == torch.tensor(answer)
            self._judged[key] = int(same.sum()), float(gaps.max())
        return self._judged[key]

    def _count_tied(self, index: int, answer: Tokens) -> int:
        """Return how many tokens are not the reference's own, but would be after a small change of the embeddings."""
        prompt, ours = self._prompts[index], torch.tensor(answer)
        best = self._reference.logprobs(prompt, answer).argmax(dim=1).cpu()
        nudged = torch.tensor([self._reference.nudged_tokens(prompt, answer, seed) for seed in range(NUDGES)])
        return int(((best != ours) & (nudged == ours).any(dim=0)).sum())

    def _bfloat16_noise(self, answers: list[Tokens]) -> Noise:
        if self._noise is None:
            rough = Reference(self._folder, torch.bfloat16, self._device)
            largest, changed = 0.0, 0
            for prompt, answer in zip(self._prompts, answers, strict=True):
                best, tokens = self._reference.logprobs(prompt, answer).topk(CANDIDATES, dim=1)
                theirs = rough.logprobs(prompt, answer)
                largest = max(largest, float((theirs.gather(1, tokens) - best).abs().max()))
                changed += int((theirs.argmax(dim=1) != tokens[:, 0]).sum())
            self._noise = Noise(largest, changed / (len(answers) * self._length))
        return self._noise


def compare(family: str, arguments: argparse.Namespace, device: str) -> bool:
    """Print a line for each way and dtype of a family, and return whether all are good."""
    own = FAMILIES[family]
    fields = {**TINY, **own, **tiny_heads(own)} if arguments.tiny else {**REAL, **own}
    prompts = make_prompts(arguments.prompts, arguments.longest, fields["vocab_size"], arguments.seed)
    all_good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, family, fields, arguments.seed)
        division = {
            "tensor_parallel": arguments.tensor_parallel,
            "expert_parallel": arguments.expert_parallel,
            "pipeline_parallel": arguments.pipeline_parallel,
        }
        judge = Family(folder, prompts, arguments.tokens, device, division)
        for dtype, way in itertools.product(DTYPES, ways(device == "cuda")):
            began = time.perf_counter()
            try:
                verdict = judge.judge(dtype, way)
                good, text = verdict.good, str(verdict)
            except Exception as error:
                good, text = False, f"{type(error).__name__}: {error}".split("\n")[0]
            all_good &= good
            if device == "cuda":
                # The next engine needs the memory of this one's graphs and cache.
                gc.collect()
            mark, took = "ok    " if good else "FAILED", time.perf_counter() - began
            print(f"{family:<11} {dtype:<9} {way!s:<26} {mark} {text} ({took:.1f} s)", flush=True)
    return all_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs, or processes on a CPU")
    parser.add_argument("--expert-parallel", action="store_true", help="each of them has whole experts")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages of so many GPUs or processes each")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU answers within seconds")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.tiny:
        # For work this small, handing it to other threads takes longer than the work itself.
        torch.set_num_threads(1)
    # TensorFloat-32 keeps only 10 of the 23 mantissa bits of its factors.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    named = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"seed {arguments.seed}, {named}, torch {torch.__version__}, transformers {transformers.__version__}")
    results = [compare(family, arguments, device) for family in arguments.families.split(",")]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
