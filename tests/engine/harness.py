"""An engine in this process, driven step by step."""

import random
from pathlib import Path
from typing import Any

import numpy as np

from baton_engine.answer_lengths import AnswerLengths
from baton_engine.config import EngineConfig
from baton_engine.delta import Delta
from baton_engine.engine import Engine
from baton_engine.sampling import Grammar, GrammarKind, SamplingParams
from baton_engine.sequence import FinishReason, Request
from tests.models import VOCAB_SIZE

_MOST_STEPS = 5_000


def make_engine(folder: Path, **settings: Any) -> Engine:
    """Return an engine on one CPU thread, with 256 blocks unless told otherwise.

    It expects answers to end at once. They do not, so in a small pool sequences are preempted.
    """
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 256}
    engine = Engine(EngineConfig(model=str(folder), **{**defaults, **settings}))
    engine.scheduler._admitted.lengths = EndAtOnce()
    return engine


class EndAtOnce(AnswerLengths):
    """Expects no further token of any answer."""

    def going_on(self, tokens: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.zeros(np.broadcast_shapes(tokens.shape, more.shape))


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 10_007 + length).choices(range(VOCAB_SIZE), k=length)


def make_request(id: int, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Request:
    """Return a request; fields that Request does not have go into its sampling."""
    own = {name: fields.pop(name) for name in Request.__struct_fields__ if name in fields}
    return Request(id=id, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, **fields), **own)


def make_various_requests(common: list[int]) -> list[Request]:
    """Return requests with choices, sampling parameters, logprobs and a grammar. Two prompts begin with `common`."""
    rule = Grammar(GrammarKind.REGEX, "[a-f]{4,9}")
    return [
        make_request(0, common + make_prompt(9), 30, n=4, temperature=1.0, seed=5),
        make_request(1, common + make_prompt(20), 30, temperature=1.0, top_p=0.9, seed=7, frequency_penalty=0.5),
        make_request(2, make_prompt(33), 20, logprobs=2, prompt_logprobs=2),
        make_request(3, make_prompt(5), 20, grammar=rule, eos_token_ids=[1]),
        make_request(4, make_prompt(60), 40),
    ]


class Transcript:
    """The output of an engine: tokens and finish reasons by (request, choice)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], FinishReason] = {}
        self.deltas: list[Delta] = []

    def expect(self, request: Request) -> None:
        """Enter the output that a continued request already has."""
        if request.output:
            self.tokens[request.id, request.choice] = list(request.output)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = delta.id, delta.choice
            tokens = self.tokens.setdefault(key, [])
            assert key not in self.reasons, f"{key} goes on after its end"
            assert delta.offset == len(tokens), f"{key} has {len(tokens)} tokens and gets one for {delta.offset}"
            tokens += delta.tokens
            self.deltas.append(delta)
            if delta.finish_reason:
                self.reasons[key] = delta.finish_reason

    def first(self, id: int) -> Delta:
        """Return the first delta of choice 0 of a request."""
        return next(delta for delta in self.deltas if (delta.id, delta.choice) == (id, 0))


def finish(engine: Engine, transcript: Transcript) -> None:
    """Step until nothing is left to do."""
    for _ in range(_MOST_STEPS):
        if not engine.has_work:
            return
        transcript.take(engine.step().deltas)
    raise AssertionError(f"the engine still has work after {_MOST_STEPS} steps")


def generate(engine: Engine, requests: list[Request]) -> Transcript:
    """Run requests to their end, all at once."""
    transcript = Transcript()
    for request in requests:
        assert engine.request_error(request) is None
        transcript.expect(request)
        engine.add(request)
    finish(engine, transcript)
    return transcript


def assert_idle(engine: Engine) -> None:
    """Assert that no block is held, no sequence is scheduled, and every counter is right."""
    assert not engine.has_work
    assert engine.scheduler.importing == []
    assert engine.pool.num_held == 0
    engine.check_integrity()
