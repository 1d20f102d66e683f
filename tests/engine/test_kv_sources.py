"""KV that a source brings takes the place of computing it, and a source that fails costs time only."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from baton_common.block_hash import block_hashes
from baton_common.extent import Extent
from baton_engine.delta import Reservation
from baton_engine.engine import Engine
from baton_engine.pipeline import Pipeline
from baton_engine.sequence import Sequence
from tests.models import reference_choices, reference_greedy

from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request
from .host_tier import HostTier
from .ledger import expected_output, make_ledger_engine

SIZE = 4
_MOST_STEPS = 1_000


def make_tiered(folder: Path, **settings: object) -> tuple[Engine, HostTier]:
    """Return an engine with a small pool, and its tier."""
    defaults = {"num_blocks": 120, "max_model_len": 170}
    engine = make_engine(folder, block_size=SIZE, max_num_batched_tokens=24, **{**defaults, **settings})
    cache = engine.runner.cache

    def read(tables: list[list[int]], extent: Extent) -> torch.Tensor:
        values = torch.empty(cache.layout.size(extent), dtype=torch.uint8)
        cache.gather(tables, extent, values)
        return values

    return engine, HostTier(engine, read)


def with_evicted_prompt(folder: Path, length: int = 61) -> tuple[Engine, HostTier, list[int]]:
    """Return an engine and its tier, and a prompt that the engine has served and whose blocks the pool has evicted."""
    engine, tier = make_tiered(folder)
    prompt = make_prompt(length)
    generate(engine, [make_request(0, prompt, 2)])
    engine.pool.release(engine.pool.allocate(engine.pool.num_blocks))
    assert engine.pool.num_cached == 0
    return engine, tier, prompt


def run(engine: Engine, tier: HostTier) -> Transcript:
    """Step until nothing is left to do, while the tier brings what is ordered."""
    transcript = Transcript()
    for _ in range(_MOST_STEPS):
        if not engine.has_work and not tier.orders:
            return transcript
        transcript.take(engine.step().deltas)
        for id in list(tier.orders):
            tier.bring(id)
    raise AssertionError(f"the engine still has work after {_MOST_STEPS} steps")


@pytest.mark.parametrize("name", ["llama", "windowed"])
@pytest.mark.parametrize(("length", "computed"), [(61, 1), (62, 2), (64, 4)])
def test_evicted_kv_is_not_computed_again(
    name: str, length: int, computed: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    engine, tier, prompt = with_evicted_prompt(folder, length)
    before = engine._step_tokens.total
    engine.add(make_request(1, prompt, 20))
    transcript = run(engine, tier)
    assert transcript.tokens[1, 0] == reference_greedy(folder, prompt, 20)
    assert tier.brought == length - computed
    assert engine._step_tokens.total - before == computed + 19
    assert_idle(engine)


def test_the_tier_brings_only_what_the_cache_lacks(llama: Path) -> None:
    engine, tier, prompt = with_evicted_prompt(llama)
    engine.add(make_request(1, prompt[:21], 2))
    run(engine, tier)
    engine.add(make_request(2, prompt, 20))
    engine.step()
    _, order = tier.orders[2]
    assert (order.first_token, order.num_tokens, order.cached_tokens) == (20, 40, 20)
    assert run(engine, tier).tokens[2, 0] == reference_greedy(llama, prompt, 20)
    assert_idle(engine)


class Promise:
    """A source that promises the first 8 tokens of every prompt once `on` is set, and is never asked to bring them."""

    brings_first_tokens = False
    on = False

    def reach(self, sequence: Sequence, cached: Callable[[], int]) -> int:
        return 8 if self.on else 0

    def order(self, sequence: Sequence, reservation: Reservation) -> None:
        raise AssertionError("a request that has forked has several sequences, for which nothing can be ordered")

    def cancel(self, id: int) -> None: ...


def test_a_prompt_preempted_while_its_first_tokens_are_under_way_keeps_its_choices(tmp_path: Path) -> None:
    """It waits for a source then, and forks when the tokens come. Its KV is computed again, and the other choice of the
    request goes on."""
    engine = make_ledger_engine(
        tmp_path, 1, block_size=4, num_blocks=64, max_num_batched_tokens=50, max_num_seqs=4, max_model_len=200,
        enable_prefix_caching=False,
    )  # fmt: skip
    source, transcript, prompt = Promise(), Transcript(), [0, 1] * 5
    engine.add_source(source)
    engine.add(make_request(1, prompt, 9, n=2))
    transcript.take(engine.step().deltas)
    [sequence] = engine.scheduler.running
    assert sequence.pending
    source.on = True
    engine.scheduler._preempt(sequence)
    finish(engine, transcript)
    assert transcript.tokens == {(1, choice): expected_output(prompt, choice, 9) for choice in range(2)}
    assert len(transcript.reasons) == 2
    assert_idle(engine)


@pytest.mark.parametrize("lost", ["before the order", "a block in the middle"])
def test_what_a_source_cannot_bring_is_computed(llama: Path, lost: str) -> None:
    engine, tier, prompt = with_evicted_prompt(llama)
    engine.add(make_request(1, prompt, 20))
    assert engine.scheduler.waiting[0].imports
    if lost == "before the order":
        tier.kept.clear()
    engine.step()
    assert bool(tier.orders) == (lost != "before the order")
    if tier.orders:
        sequence, _ = tier.orders[1]
        del tier.kept[0, sequence.hashes(0, 9)[8]]
    assert run(engine, tier).tokens[1, 0] == reference_greedy(llama, prompt, 20)
    assert tier.brought == 0
    assert_idle(engine)


def test_a_source_that_fails_is_not_asked_again_for_the_same_request(llama: Path) -> None:
    engine, _, prompt = with_evicted_prompt(llama)
    engine.add(make_request(1, prompt, 20))
    engine.step()
    engine.cancel_import(1)
    transcript = Transcript()
    finish(engine, transcript)
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 20)
    assert_idle(engine)


def test_prompt_logprobs_are_computed(llama: Path) -> None:
    """They need the logits of every token, which no source brings."""
    engine, tier, prompt = with_evicted_prompt(llama)
    transcript = generate(engine, [make_request(1, prompt, 2, prompt_logprobs=0)])
    assert len(transcript.first(1).prompt_logprobs or []) == len(prompt) - 1
    assert not tier.brought


def test_an_aborted_request_takes_its_order_back(llama: Path) -> None:
    engine, tier, prompt = with_evicted_prompt(llama)
    engine.add(make_request(1, prompt, 20))
    engine.step()
    assert list(tier.orders) == [1]
    engine.abort(1)
    assert not tier.orders
    assert_idle(engine)


def test_an_order_of_prefill_pods_does_not_wait_for_the_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    engine.add(make_request(0, make_prompt(40), 1))
    engine.add(make_request(1, make_prompt(40), 1, imports_kv=True))
    done, orders = iter([False]), list[Reservation]()
    monkeypatch.setattr(Pipeline, "done", lambda _: next(done, True))
    result = engine.step(lambda: orders.extend(engine.reserve()))
    assert [delta.id for delta in result.deltas] == [0]
    assert [order.id for order in orders] == [1]
    assert not result.reservations


def test_a_request_of_prefill_pods_is_theirs(llama: Path) -> None:
    """They bring the first tokens too. Once they have failed, no other source is asked."""
    engine, tier, prompt = with_evicted_prompt(llama)
    engine.add(make_request(1, prompt, 20, imports_kv=True))
    [order] = engine.step().reservations
    assert (order.id, order.num_tokens) == (1, 61)
    assert not tier.orders
    engine.cancel_import(1)
    assert run(engine, tier).tokens[1, 0] == reference_greedy(llama, prompt, 20)
    assert_idle(engine)


@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_prompts_come_back_from_the_tier_without_a_wrong_token(name: str, request: pytest.FixtureRequest) -> None:
    """Preempted requests, several choices, prompts that share beginnings, and a tier that forgets."""
    folder: Path = request.getfixturevalue(name)
    rng = random.Random(5)
    engine, tier = make_tiered(folder, num_blocks=120 if name == "windowed" else 60)
    texts = [make_prompt(140, seed=seed) for seed in range(3)]
    requests = [
        make_request(id, rng.choice(texts)[: rng.randint(5, 140)], rng.randint(1, 18), n=rng.choice([1, 1, 2]))
        for id in range(36)
    ]
    transcript = Transcript()
    waiting = list(requests)
    while waiting or engine.has_work or tier.orders:
        if waiting and rng.random() < 0.2:
            engine.add(msgspec.structs.replace(waiting.pop()))
        transcript.take(engine.step().deltas)
        for id in list(tier.orders):
            if rng.random() < 0.5:
                tier.bring(id)
        if tier.kept and rng.random() < 0.05:
            del tier.kept[rng.choice(list(tier.kept))]
    for each in requests:
        for choice in range(each.sampling.n):
            tokens = transcript.tokens[each.id, choice]
            assert tokens == reference_choices(folder, each.prompt, tokens)
    assert tier.brought > 200
    assert_idle(engine)


def test_the_cache_may_know_more_than_was_to_be_brought(llama: Path) -> None:
    """Another request computes the same prompt while this one waits for blocks."""
    engine, tier, prompt = with_evicted_prompt(llama)
    known = list(block_hashes(prompt, SIZE, len(prompt) // SIZE))
    lost = {key: tier.kept.pop(key) for key in list(tier.kept) if key[1] not in known[:5]}
    held = engine.pool.allocate(100)
    engine.add(make_request(1, prompt, 3))
    engine.add(make_request(2, prompt[:41], 2, priority=-1, prompt_logprobs=0))
    tier.kept.update(lost)
    assert engine.scheduler.waiting[-1].import_end == 20
    transcript = run(engine, tier)
    assert transcript.first(1).cached_tokens == 40
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 3)
    engine.pool.release(held)
    assert_idle(engine)
