"""Requests find in the prefix cache only published blocks and blocks of requests with the same salt."""

import random
from pathlib import Path

import pytest

from baton_common.block_hash import block_hashes, block_key, block_keys
from baton_common.cache_scope import MAX_SALT_BYTES, UNSALTED, CacheScope
from baton_engine.engine import Engine
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.sequence import Request

from .handover import Pair
from .harness import Transcript, assert_idle, generate, make_engine, make_prompt, make_request

ACME, ROAD = CacheScope(b"acme"), CacheScope(b"road")
SIZE = 16


def cached(engine: Engine, prompt: list[int], scope: CacheScope, **fields: object) -> int | None:
    return generate(engine, [make_request(0, prompt, 2, cache_scope=scope, **fields)]).first(0).cached_tokens


def full_keys(tokens: list[int], size: int, scope: CacheScope) -> set[int]:
    """Return the keys of all full blocks, the last token's included."""
    return set(map(block_key, block_hashes(tokens, size, len(tokens) // size, scope)))


def gained(engine: Engine) -> set[int]:
    """Return the keys that the engine has reported, whether the cache still holds them or not."""
    hashes, _ = engine.pool.changes.take(1 << 20)
    return set(map(block_key, hashes))


@pytest.mark.parametrize(("first", "second"), [(ACME, ROAD), (ACME, UNSALTED), (UNSALTED, ACME)])
def test_a_prompt_is_found_only_under_its_own_salt(llama: Path, first: CacheScope, second: CacheScope) -> None:
    engine, prompt = make_engine(llama), make_prompt(70)
    assert [cached(engine, prompt, scope) for scope in (first, second, first, second)] == [0, 0, 64, 64]
    assert_idle(engine)


@pytest.mark.parametrize(
    ("published", "shared"), [(0, 0), (15, 0), (16, 16), (47, 32), (48, 48), (70, 64), (2**32 - 1, 64)]
)
def test_only_full_blocks_of_published_tokens_are_shared(llama: Path, published: int, shared: int) -> None:
    engine, prompt = make_engine(llama), make_prompt(70)
    scopes = [CacheScope(salt, published) for salt in (b"acme", b"road")]
    assert [cached(engine, prompt, scope) for scope in (*scopes, *scopes)] == [0, shared, 64, 64]
    # A request without a salt finds the published blocks and no others.
    assert cached(engine, prompt, UNSALTED) == shared


def test_what_follows_another_beginning_is_never_shared(llama: Path) -> None:
    """Beyond the published tokens, equal blocks are shared neither with another tenant nor after a different block."""
    engine, published, tail = make_engine(llama), make_prompt(32), make_prompt(48, seed=3)
    scope = CacheScope(b"acme", 32)
    cached(engine, published + tail, scope)
    assert cached(engine, published + tail, CacheScope(b"road", 32)) == 32
    assert cached(engine, published + make_prompt(16, seed=4) + tail, scope) == 32


@pytest.mark.parametrize("length", [5, 20])
def test_each_choice_leaves_its_answer_under_the_salt(llama: Path, length: int) -> None:
    """Choices fork before the first full block, or after it."""
    engine, prompt = make_engine(llama), make_prompt(length)
    request = make_request(0, prompt, 40, cache_scope=ACME, n=3, temperature=1.0, seed=5)
    answers = generate(engine, [request]).tokens
    for choice in range(3):
        turn = prompt + answers[0, choice]
        assert cached(engine, turn, CacheScope(b"road%d" % choice)) == 0
        assert cached(engine, turn, ACME) == (len(turn) - 1) // SIZE * SIZE


def test_a_request_that_goes_on_keeps_its_salt(llama: Path) -> None:
    engine, prompt, output = make_engine(llama), make_prompt(40), make_prompt(30, seed=1)
    going_on = make_request(0, prompt, 40, cache_scope=ACME, output=output)
    generate(engine, [going_on])
    assert cached(engine, prompt + output + [1], ROAD) == 0
    assert cached(engine, prompt + output + [1], ACME) == 64


def test_both_pods_of_a_handover_keep_the_salt(llama: Path) -> None:
    prefill, decode, prompt = make_engine(llama), make_engine(llama), make_prompt(70)
    pair = Pair(prefill, decode)
    pair.add(make_request(0, prompt, 8, cache_scope=ACME, n=2, temperature=1.0, seed=5))
    pair.run()
    prefill.abort(0)
    for engine in (prefill, decode):
        assert cached(engine, prompt, ROAD) == 0
        assert cached(engine, prompt, UNSALTED) == 0
        assert cached(engine, prompt, ACME) == 64


@pytest.mark.parametrize("seed", range(6))
def test_engines_tell_of_the_keys_that_gateways_look_for(llama: Path, seed: int) -> None:
    """Requests of several scopes with common beginnings, with choices, continuations and preemption."""
    rng = random.Random(seed)
    scopes = [CacheScope(salt, rng.choice([0, 5, 8, 18])) for salt in (b"", b"acme", b"road", b"x" * MAX_SALT_BYTES)]
    size = rng.choice([4, 8])
    engine = make_engine(llama, block_size=size, num_blocks=192 // size, max_model_len=96)
    known: set[int] = set()
    told: set[int] = set()
    for _ in range(4):
        requests = [_any_request(id, rng, rng.choice(scopes)) for id in range(5)]
        transcript = generate(engine, requests)
        told |= gained(engine)
        for request in requests:
            for tokens in _texts(request, transcript):
                known |= full_keys(tokens, size, request.cache_scope)
    assert engine.load().preemptions > 0
    assert told
    assert told <= known
    # The blocks that are cached now are found under the gateway's keys.
    request = _any_request(9, rng, rng.choice(scopes[1:]))
    generate(engine, [request])
    assert set(block_keys(request.prompt, size, request.cache_scope)) <= {
        block_key(h) for h in engine.pool._block_of[0]
    }


def _any_request(id: int, rng: random.Random, scope: CacheScope) -> Request:
    prompt = make_prompt(20, seed=rng.randrange(2)) + make_prompt(rng.randrange(1, 20), seed=rng.randrange(4))
    fields = {"n": rng.choice([1, 3])} if rng.random() < 0.5 else {"output": make_prompt(6, seed=8)}
    return make_request(id, prompt, 30, cache_scope=scope, temperature=1.0, seed=id, **fields)


def _texts(request: Request, transcript: Transcript) -> list[list[int]]:
    return [request.prompt + tokens for (id, _), tokens in transcript.tokens.items() if id == request.id]


def test_a_salt_that_no_hash_takes_is_refused(llama: Path) -> None:
    """A longer key is an error of BLAKE2b, and an error in the engine would end the pod."""
    engine = make_engine(llama)
    longest = CacheScope(b"x" * MAX_SALT_BYTES)
    assert engine.request_error(make_request(0, [1, 2, 3], cache_scope=longest)) is None
    found = engine.request_error(make_request(0, [1, 2, 3], cache_scope=CacheScope(b"x" * (MAX_SALT_BYTES + 1))))
    assert found == ("cache_scope", "the salt is longer than 32 bytes")


def test_compiled_grammars_are_shared_under_one_salt_only(llama: Path) -> None:
    """The time of a compilation would tell one tenant whether another has used the grammar."""
    engine, grammar = make_engine(llama), Grammar(GrammarKind.REGEX, "[a-c]{3}")
    scopes = (ACME, ROAD, ACME, CacheScope(b"acme", 16))
    generate(
        engine, [make_request(id, [1, 2], 8, cache_scope=scope, grammar=grammar) for id, scope in enumerate(scopes)]
    )
    assert [salt for salt, *_ in engine._compiling._grammars._compiled] == [b"road", b"acme"]
