"""Two ranks with the GPU's runner, as threads of this process: both take the same graphs and draw the same tokens."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton_engine.config import EngineConfig
from baton_engine.cuda_runner import CudaRunner
from baton_engine.executor import Launched, WithoutLayers
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.ranks.messages import Launch, decode, encode
from baton_engine.ranks.small_sums import SmallSums
from baton_engine.ranks.symmetric_memory import SymmetricMemory
from baton_engine.results import Results
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.step_plan import StepPlan
from tests.conftest import MakeModel
from tests.models import is_greedy
from tests.packing import gptq
from tests.quantized import rewrite

from .fake_cuda import pretend
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .test_equality import SHAPES
from .test_quantized_models import with_mxfp4_experts

_WAIT_S = 30.0
_SMALL_BYTES = 2048  # of the sums in symmetric memory: those of steps with few tokens


class ThreadMemory(SymmetricMemory):
    """Implements SymmetricMemory for one of two threads. exchange: as in ThreadRanks."""

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        super().__init__(rank, 2, torch.device("cpu"), HashStore(), "test")
        self.exchange = exchange
        self.count = 0  # of sums

    def add_up_at_once(self, y: torch.Tensor) -> torch.Tensor:
        one, other = self.exchange(y.clone())
        self.count += 1
        return one + other

    add_up_pushed = add_up_in_steps = add_up_at_once


class ThreadRanks:
    """Implements Ranks for one of two threads. They take turns, as Triton's interpreter is for one thread at a time.

    turn: held by the rank that works.
    """

    count = 2

    def __init__(self, rank: int, turn: threading.Lock, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.rank = rank
        self._turn, self._barrier, self._parts = turn, barrier, parts
        self.memory = ThreadMemory(rank, self._exchange)
        self._small = SmallSums(self.memory, _SMALL_BYTES // 4, _SMALL_BYTES // 2, _SMALL_BYTES)

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        small = self._small.sum(y)
        if small is not None:
            return small
        one, other = self._exchange(y.clone())
        return y.copy_(one + other)

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(y.clone()), dim=1)

    def least(self, value: int) -> int:
        return min(self._exchange(value))

    def _exchange(self, part: Any) -> list[Any]:
        self._parts[self.rank] = part
        self._turn.release()
        try:
            self._barrier.wait(_WAIT_S)
            parts = list(self._parts)
            self._barrier.wait(_WAIT_S)
        finally:
            self._turn.acquire()
        return parts


class Both(WithoutLayers):
    """A step that both ranks have launched."""

    def __init__(self, launched: list[Launched]) -> None:
        self._launched = launched

    def draw_masked(self, masks: np.ndarray) -> None:
        for launched in self._launched:
            launched.draw_masked(masks)

    def done(self) -> bool:
        return all(launched.done() for launched in self._launched)

    def wait(self) -> Results:
        one, other = (launched.wait() for launched in self._launched)
        assert one == other
        return one


class TwoThreads:
    """Implements Executor with two runners. A thread of its own runs the second one."""

    def __init__(self, config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> None:
        self._turn = turn = threading.Lock()
        barrier, parts = threading.Barrier(2), [None, None]
        self._second = ThreadPoolExecutor(1, "rank 1")

        self.ranks = [ThreadRanks(rank, turn, barrier, parts) for rank in range(2)]

        def make(rank: int) -> CudaRunner:
            with turn:
                runner = CudaRunner(config, model, None, self.ranks[rank])
                runner.start()
            return runner

        second = self._second.submit(make, 1)
        self.runners = [make(0), second.result(_WAIT_S)]
        for name in ("cache", "dtype", "quantization", "max_model_len", "depth", "stages", "times", "threads"):
            setattr(self, name, getattr(self.runners[0], name))

    def launch(self, plan: StepPlan) -> Both:
        sent = decode(encode(Launch(plan)))
        assert isinstance(sent, Launch)
        second = self._second.submit(self._launch, 1, sent.plan)
        return Both([self._launch(0, plan), second.result(_WAIT_S)])

    def _launch(self, rank: int, plan: StepPlan) -> Launched:
        with self._turn:
            return self.runners[rank].launch(plan)

    def fence(self) -> None:
        return None


def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines have two ranks with the GPU's runner."""
    pretend(monkeypatch)
    monkeypatch.setattr("baton_engine.engine.make_runner", TwoThreads)
    # Of eager work, then of graphs. Rank 1 finds eager work faster in one case, where rank 0 does not.
    times = {rank: iter([1.0, 0.5, 1.0, 0.5 if rank == "MainThread" else 1.5]) for rank in ("MainThread", "rank 1_0")}
    measured = lambda run: (run(), next(times[threading.current_thread().name]))[1]  # noqa: E731
    monkeypatch.setattr("baton_engine.token_graphs._seconds", measured)


@pytest.mark.parametrize(
    "name", ["llama-biases-llama3", "bloom-tied", "gpt-oss", "glm4-moe-groups", "deepseek-v2-lite", "gemma3-tied"]
)
def test_tokens_are_those_of_transformers(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family, overrides = SHAPES[name]
    folder: Path = tiny_model(family, **overrides)
    two_threads(monkeypatch)
    engine = make_engine(folder, max_num_batched_tokens=40, max_num_seqs=4)
    prompts = [make_prompt(length, seed=3) for length in (1, 17, 50)]
    requests = [make_request(id, prompt, 10) for id, prompt in enumerate(prompts)]
    rule = Grammar(GrammarKind.REGEX, "[a-f]{4,9}")
    others = [
        make_request(3, make_prompt(9), 12, temperature=1.0, seed=3, n=2, frequency_penalty=0.3),
        make_request(4, make_prompt(30), 12, logprobs=2, prompt_logprobs=1, grammar=rule, eos_token_ids=[1]),
    ]
    transcript = generate(engine, [*requests, *others])
    for id, prompt in enumerate(prompts):
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert_idle(engine)
    graphs = [runner._token_graphs.sizes for runner in engine.runner.runners]
    assert graphs[0] == graphs[1] == [4]
    assert engine.runner.ranks[0].memory.count == engine.runner.ranks[1].memory.count > 0


@pytest.mark.parametrize("format", ["gptq", "mxfp4"])
def test_codes_of_experts(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, format: str) -> None:
    if format == "gptq":
        base = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=128)
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        folder, plain = rewrite(base, tmp_path / "model", config, lambda _, w: gptq(w, 4, 32, 1))
    else:
        folder, plain = with_mxfp4_experts(tiny_model("gpt_oss", intermediate_size=128), tmp_path)
    two_threads(monkeypatch)
    prompt = make_prompt(12)
    assert is_greedy(plain, prompt, generate(make_engine(folder), [make_request(0, prompt, 5)]).tokens[0, 0])


@pytest.mark.parametrize("name", ["gemma2-tied", "granite-biases", "chameleon"])
def test_decodes_exchange_the_best_tokens_alone(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Families that change logits after the product, with a vocabulary that the ranks divide unequally."""
    family, overrides = SHAPES[name]
    folder: Path = tiny_model(family, **overrides, vocab_size=514)
    requests = [
        make_request(0, make_prompt(9), 12),
        make_request(1, make_prompt(16), 12, temperature=1.0, seed=3, n=2),
    ]
    filtered = make_request(2, make_prompt(20), 12, temperature=1.0, seed=4, top_k=9)
    alone = generate(make_engine(folder), [*requests, filtered]).tokens
    two_threads(monkeypatch)
    widths: list[int] = []
    join = ThreadRanks.join
    monkeypatch.setattr(ThreadRanks, "join", lambda self, y: (widths.append(y.shape[1]), join(self, y))[1])
    engine = make_engine(folder, max_num_batched_tokens=40, max_num_seqs=4)
    widths.clear()
    tokens = generate(engine, requests).tokens
    # Steps with prompts gather 260 and 254 logits, of which the latter are padded.
    assert set(widths) == {260, 2}
    assert widths.count(2) >= 2 * 10
    widths.clear()
    tokens |= generate(engine, [filtered]).tokens
    assert set(widths) == {260}
    assert tokens == alone
