"""A request that is aborted at any stage leaves nothing behind and changes no other request."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine.engine import Engine
from baton_engine.sequence import State
from tests.models import reference_greedy

from .handover import Pair
from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request

PROMPT = make_prompt(80, seed=9)
Stage = Callable[[Engine, Transcript], None]


def until(engine: Engine, transcript: Transcript, tokens: int) -> None:
    """Step until request 1 has so many tokens."""
    while len(transcript.tokens.get((1, 0), [])) < tokens:
        transcript.take(engine.step().deltas)


def waiting(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT))


def prefilling(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT))
    transcript.take(engine.step().deltas)
    assert 0 < engine._sequences[1][0].computed < len(PROMPT)


def decoding(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT))
    until(engine, transcript, 4)


def decoding_choices(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT, n=3))
    until(engine, transcript, 4)
    assert len(engine._sequences[1]) == 3


def preempted(engine: Engine, transcript: Transcript) -> None:
    decoding(engine, transcript)
    [sequence] = engine._sequences[1]
    engine.scheduler._preempt(sequence)
    assert sequence.state is State.WAITING


def importing(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT, imports_kv=True))
    result = engine.step()
    transcript.take(result.deltas)
    [reservation] = result.reservations
    extent = engine.runner.cache.layout.extent(64, 6)
    values = torch.ones(engine.runner.cache.layout.size(extent) // 4).view(torch.uint8)
    assert engine.import_kv(1, reservation.generation, extent, values) is False


def importing_with_first_tokens(engine: Engine, transcript: Transcript) -> None:
    importing(engine, transcript)
    engine.import_tokens(1, [5])


def exporting(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT, exports_from=0))
    result = engine.step()
    transcript.take(result.deltas)
    assert result.exports


def exported(engine: Engine, transcript: Transcript) -> None:
    engine.add(make_request(1, PROMPT, exports_from=0))
    until(engine, transcript, 1)
    assert engine._sequences[1][0].state is State.EXPORTED


STAGES: list[Stage] = [
    waiting,
    prefilling,
    decoding,
    decoding_choices,
    preempted,
    importing,
    importing_with_first_tokens,
    exporting,
    exported,
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_an_aborted_request_leaves_nothing(llama: Path, stage: Stage) -> None:
    engine = make_engine(llama, max_num_batched_tokens=20)
    stage(engine, Transcript())
    engine.check_integrity()
    engine.abort(1)
    assert_idle(engine)
    engine.abort(1)
    assert engine.step().deltas == []
    transcript = generate(engine, [make_request(1, PROMPT)])
    assert transcript.tokens[1, 0] == reference_greedy(llama, PROMPT, 16)
    assert_idle(engine)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_an_abort_changes_nothing_for_others(llama: Path, stage: Stage) -> None:
    """The prompts share their beginning, so that an abort drops references to blocks that another request still
    uses."""
    engine, transcript = make_engine(llama, max_num_batched_tokens=20), Transcript()
    prompt = PROMPT[:50] + make_prompt(10)
    engine.add(make_request(0, prompt, 40))
    while (0, 0) not in transcript.tokens:
        transcript.take(engine.step().deltas)
    stage(engine, transcript)
    engine.abort(1)
    engine.check_integrity()
    finish(engine, transcript)
    assert transcript.tokens[0, 0] == reference_greedy(llama, prompt, 40)
    assert_idle(engine)


def test_aborting_both_ends_of_a_hand_over_at_any_moment(llama: Path) -> None:
    for moment in range(14):
        pair = Pair(make_engine(llama, max_num_batched_tokens=24), make_engine(llama), seed=moment)
        pair.add(make_request(0, PROMPT, 6, n=2))
        pair.step_decode()
        for turn in range(moment):
            (pair.step_prefill, pair.deliver, pair.step_decode)[turn % 3]()
        for engine in (pair.prefill, pair.decode):
            engine.abort(0)
            assert_idle(engine)


def test_an_unknown_request_is_nothing_to_abort(llama: Path) -> None:
    engine = make_engine(llama)
    engine.abort(99)
    engine.abort(99)
    engine.cancel_import(99)
    engine.import_tokens(99, [1])
    assert_idle(engine)
