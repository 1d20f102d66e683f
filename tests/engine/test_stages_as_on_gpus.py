"""Three stages with the GPU's runner, in one process: graphs read what the previous stage has sent."""

import contextlib
from collections import deque
from typing import Any, cast

import pytest
import torch

from baton_engine.config import EngineConfig
from baton_engine.executor import Launched
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.ranks.messages import Command, DrawMasked, Launch, decode, encode
from baton_engine.ranks.processes import EXCHANGE_BYTES, RankProcesses
from baton_engine.ranks.results_sender import decode_results, encode_results
from baton_engine.ranks.seat import Seat
from baton_engine.ranks.stages_executor import StagesExecutor
from baton_engine.results import Results
from baton_engine.runners import make_local_runner, read_model
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.shard import ALONE, OneRank
from baton_engine.stage import Stage
from tests.conftest import MakeModel
from tests.models import is_greedy

from .fake_cuda import pretend
from .harness import assert_idle, generate, make_engine, make_prompt, make_request

STAGES = 3


class QueuedStage(Stage):
    """A stage whose neighbours are in this process. queues: of what each stage has sent."""

    def __init__(self, number: int, queues: list[deque[torch.Tensor]]) -> None:
        super().__init__(number, STAGES)
        self._queues = queues

    def receive(self, hidden: torch.Tensor) -> None:
        hidden.copy_(self._queues[self.number - 1].popleft())

    def send(self, hidden: torch.Tensor) -> None:
        self._queues[self.number].append(hidden)


class FirstRank(OneRank):
    """Stands in for Group."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage


class Exchange:
    """Stands in for a process whose KV goes in and out through memory."""

    def __init__(self) -> None:
        self.exchange = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8)


class LaterStages:
    """Stands in for RankProcesses. The later stages do what they were told as late as they can."""

    def __init__(self) -> None:
        self.seats = [Seat(number, 1, STAGES) for number in range(STAGES)]
        self.ranks = [Exchange() for _ in range(1, STAGES)]
        self._queues: list[deque[torch.Tensor]] = [deque() for _ in range(STAGES)]
        self._commands: deque[bytes] = deque()

    def begin(self, config: EngineConfig, device: torch.device) -> FirstRank:
        self._config = config
        return FirstRank(QueuedStage(0, self._queues))

    def await_loaded(self) -> None:
        model = read_model(self._config)
        self._runners = [
            make_local_runner(self._config, model, "cuda", None, ALONE, QueuedStage(number, self._queues))
            for number in range(1, STAGES)
        ]
        assert not any(self._queues)

    def explained(self, kind: type[Exception]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def check(self) -> None: ...

    def close(self) -> None: ...

    def send(self, command: Command) -> None:
        # All KV that goes in or out here is that of the first use, which no step has written.
        if isinstance(command, Launch | DrawMasked):
            self._commands.append(encode(command))

    def await_confirmations(self) -> None: ...

    def results_arrived(self) -> bool:
        return False

    def receive_results(self) -> Results:
        command = decode(self._commands.popleft())
        assert isinstance(command, Launch)
        launched: list[Launched] = []
        for runner in self._runners:
            runner.learn(command.drawn)
            launched.append(runner.launch(command.plan))
        if command.plan.masked:
            masked = decode(self._commands.popleft())
            assert isinstance(masked, DrawMasked)
            for each in launched:
                each.draw_masked(masked.masks)
        return decode_results(encode_results(launched[-1].wait()))


def make_stages(config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> StagesExecutor:
    return StagesExecutor(config, model, "cuda", progress, cast(RankProcesses, LaterStages()))


@pytest.mark.parametrize(
    ("family", "layers", "eager"),
    [
        ("llama", {"num_hidden_layers": 4}, False),
        ("llama", {"num_hidden_layers": 4}, True),
        ("gpt2", {"n_layer": 3}, False),
        ("gemma3", {}, False),
        ("hy_v4", {"indexer_types": ["full"] * 3}, False),
    ],
)
def test_tokens_are_those_of_transformers(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, family: str, layers: dict[str, Any], eager: bool
) -> None:
    folder = tiny_model(family, **layers)
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "enforce_eager": eager}
    prompts = [make_prompt(length, seed=3) for length in (1, 17, 50)]
    rule = Grammar(GrammarKind.REGEX, "[a-f]{4,9}")
    requests = [
        *(make_request(id, prompt, 10) for id, prompt in enumerate(prompts)),
        make_request(3, make_prompt(9), 12, temperature=1.0, seed=3, n=2, frequency_penalty=0.3),
        make_request(4, make_prompt(30), 12, logprobs=2, prompt_logprobs=1, grammar=rule, eos_token_ids=[1]),
    ]
    pretend(monkeypatch)
    one = generate(make_engine(folder, **settings), requests)
    monkeypatch.setattr("baton_engine.engine.make_runner", make_stages)
    engine = make_engine(folder, pipeline_parallel=STAGES, **settings)
    several = generate(engine, requests)
    assert several.tokens == one.tokens
    for id, prompt in enumerate(prompts):
        assert is_greedy(folder, prompt, several.tokens[id, 0])
    assert_idle(engine)
