"""Requests that another engine has begun continue with the tokens that a single engine would generate."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.sequence import Request

from .fake_cuda import pretend
from .handover import Pair
from .harness import Transcript, assert_idle, generate, make_engine, make_prompt, make_request
from .test_cuda_runner import KINDS

NUM_REQUESTS = 30


def begun(requests: list[Request], whole: Transcript, rng: random.Random) -> list[Request]:
    """Return each choice of each request as a request that continues somewhere before the choice's end."""
    going_on = []
    for (id, choice), tokens in whole.tokens.items():
        sampling = msgspec.structs.replace(requests[id].sampling, n=1, prompt_logprobs=None)
        done = rng.randrange(len(tokens))
        going_on.append(
            msgspec.structs.replace(
                requests[id], id=len(going_on), sampling=sampling, output=tokens[:done], choice=choice
            )
        )
    return going_on


def assert_same(whole: Transcript, going_on: list[Request], rest: Transcript) -> None:
    for request, (key, tokens) in zip(going_on, whole.tokens.items(), strict=True):
        own = request.id, request.choice
        assert rest.tokens[own] == tokens, key
        assert rest.reasons[own] == whole.reasons[key]
        expected = [d.logprobs for d in whole.deltas if (d.id, d.choice) == key][len(request.output) :]
        assert [[entry.token_id for entry in d.logprobs] for d in rest.deltas if (d.id, d.choice) == own] == [
            [entry.token_id for entry in logprobs] for logprobs in expected
        ]
        for d, logprobs in zip([d for d in rest.deltas if (d.id, d.choice) == own], expected, strict=True):
            assert [e.logprob for e in d.logprobs] == pytest.approx([e.logprob for e in logprobs], abs=1e-4)


def in_one_engine(folder: Path, requests: list[Request]) -> Transcript:
    engine = make_engine(folder)
    transcript = generate(engine, requests)
    assert_idle(engine)
    return transcript


def in_a_small_pool(folder: Path, requests: list[Request]) -> Transcript:
    engine = make_engine(folder, block_size=4, num_blocks=40, max_model_len=160)
    transcript = generate(engine, requests)
    assert engine.load().preemptions
    assert_idle(engine)
    return transcript


def in_a_pair(folder: Path, requests: list[Request]) -> Transcript:
    pair = Pair(make_engine(folder, max_num_batched_tokens=24), make_engine(folder), seed=1)
    for request in requests:
        pair.add(request)
    transcript = pair.run()
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)
    return transcript


@pytest.mark.parametrize("where", [in_one_engine, in_a_small_pool, in_a_pair])
def test_tokens_logprobs_and_ends_are_the_same(llama: Path, where: Callable[[Path, list[Request]], Transcript]) -> None:
    rng = random.Random(1)
    requests = [
        make_request(id, make_prompt(rng.choice([1, 15, 16, 17, 40, 100]), id), rng.randint(5, 60), **rng.choice(KINDS))
        for id in range(NUM_REQUESTS)
    ]
    whole = generate(make_engine(llama), requests)
    going_on = begun(requests, whole, rng)
    assert_same(whole, going_on, where(llama, going_on))


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_on_a_gpu_too(llama: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    requests = [make_request(id, make_prompt(30, id), 20, **KINDS[id % len(KINDS)]) for id in range(NUM_REQUESTS)]
    whole = generate(make_engine(llama), requests)
    going_on = begun(requests, whole, rng)
    pretend(monkeypatch)
    engine = make_engine(llama, max_num_seqs=5, max_num_batched_tokens=32, block_size=4, max_model_len=160, **settings)
    assert_same(whole, going_on, generate(engine, going_on))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output": [1], "n": 2}, "n"),
        ({"choice": 1, "n": 2}, "n"),
        ({"output": [1, 2, 3, 4]}, "max_tokens"),
        ({"output": [100_000]}, "output"),
        ({"output": [-1]}, "output"),
    ],
)
def test_what_cannot_go_on_is_refused(llama: Path, fields: dict[str, Any], field: str) -> None:
    error = make_engine(llama).request_error(make_request(0, [1, 2], max_tokens=4, **fields))
    assert error is not None
    assert error[0] == field


def test_an_order_made_anew_takes_nothing_of_the_old_one(llama: Path) -> None:
    """Pieces of the old order may still arrive together with those of the second prefill pod."""
    prompt = make_prompt(70)
    pair = Pair(make_engine(llama), make_engine(llama))
    request = make_request(0, prompt, 20)
    pair.add(request)
    pair.step_decode()
    old = pair.reservations[0]
    while not pair.first_tokens:
        pair.step_prefill()
    first = pair.pieces.pop(0)
    assert pair.decode.import_kv(0, old.generation, first.extent, first.values) is False
    pair.decode.import_tokens(0, pair.first_tokens.pop(0))

    pair.decode.restart_import(0)
    [new] = pair.decode.reserve()
    assert new.generation != old.generation
    assert (new.first_token, new.num_tokens) == (old.first_token, old.num_tokens)
    for late in pair.pieces:
        assert pair.decode.import_kv(0, old.generation, late.extent, late.values) is None
    complete = [pair.decode.import_kv(0, new.generation, piece.extent, piece.values) for piece in (first, *pair.pieces)]
    assert complete == [False] * len(pair.pieces) + [True]
    pair.prefill.abort(0)
    pair.pieces.clear()
    assert pair.run().tokens == generate(make_engine(llama), [request]).tokens
    pair.decode.restart_import(0)
    assert pair.decode.reserve() == []
    assert_idle(pair.decode)


def test_exports_wait_when_too_much_waits_for_decode_pods(llama: Path) -> None:
    """They wait although blocks are available: the rest of the pool is kept for the prefix cache."""
    engine = make_engine(llama, num_blocks=40, export_fraction=0.5, max_model_len=512)
    for id in range(4):
        engine.add(make_request(id, make_prompt(16 * 8, id), 4, exports_from=0))
    exported: list[int] = []
    while (result := engine.step()).progress:
        exported += [delta.id for delta in result.deltas]
    assert exported == [0, 1]
    assert engine.pool.num_held == 16
    engine.abort(0)
    assert [delta.id for delta in engine.step().deltas] == [2]
    for id in range(1, 4):
        engine.abort(id)
    # One prompt may hold more than the bound when nothing else does.
    engine.add(make_request(9, make_prompt(16 * 30), 4, exports_from=0))
    assert [delta.id for delta in engine.step().deltas] == [9]
    engine.abort(9)
    assert_idle(engine)
