"""One engine computes KV, and another one decodes on it."""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from baton_common.extent import Extent
from baton_engine.sequence import FinishReason
from tests.models import reference_choices, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request


def make_pair(folder: Path, seed: int = 0, *, prefill_block: int = 16, decode_block: int = 16) -> Pair:
    prefill = make_engine(folder, max_num_batched_tokens=24, block_size=prefill_block, num_blocks=4096 // prefill_block)
    return Pair(prefill, make_engine(folder, block_size=decode_block, num_blocks=4096 // decode_block), seed)


def assert_both_idle(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def until_first_tokens(pair: Pair) -> None:
    """Reserve, order and prefill until all KV and first tokens are exported, and deliver nothing."""
    pair.step_decode()
    while not pair.first_tokens:
        pair.step_prefill()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_reference(windowed: Path, seed: int) -> None:
    pair = make_pair(windowed, seed)
    prompts = [make_prompt(length, seed=seed) for length in (1, 15, 16, 17, 32, 60, 90, 130)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 20))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 20
        assert tokens == reference_choices(windowed, prompt, tokens)
    assert_both_idle(pair)


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 64), (64, 16), (1, 16), (24, 10)])
def test_blocks_of_different_sizes(llama: Path, prefill_block: int, decode_block: int) -> None:
    pair = make_pair(llama, seed=prefill_block, prefill_block=prefill_block, decode_block=decode_block)
    common = make_prompt(75)
    # The decode engine has cached some blocks already, which end in the middle of a block of the prefill engine.
    generate(pair.decode, [make_request(100, common)])
    prompts = [*(make_prompt(length, seed=3) for length in (1, 16, 40, 63, 64, 65, 130)), common + make_prompt(40)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 20))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_choices(llama, prompt, transcript.tokens[id, 0])
    assert_both_idle(pair)


def test_sampled_choices_are_those_of_one_engine(llama: Path) -> None:
    requests = [make_request(i, make_prompt(20 + 9 * i, seed=i), 20, n=3, temperature=1.0, seed=i) for i in range(4)]
    pair = make_pair(llama)
    for request in requests:
        pair.add(request)
    assert pair.run().tokens == generate(make_engine(llama), requests).tokens
    assert_both_idle(pair)


def test_only_what_the_decode_engine_lacks_is_carried(llama: Path) -> None:
    common = make_prompt(50)
    pair = make_pair(llama)
    generate(pair.decode, [make_request(0, common)])
    prompt = common + make_prompt(30, seed=1)
    pair.add(make_request(1, prompt, 20))
    until_first_tokens(pair)
    reservation = pair.reservations[1]
    assert (reservation.first_token, reservation.num_tokens, reservation.cached_tokens) == (48, 32, 48)
    assert min(piece.extent.tokens.start for piece in pair.pieces) == 48
    assert pair.run().tokens[1, 0] == reference_greedy(llama, prompt, 20)
    assert_both_idle(pair)


def test_what_the_prefill_engine_has_cached_is_exported_too(llama: Path) -> None:
    prompt = make_prompt(70)
    pair = make_pair(llama)
    generate(pair.prefill, [make_request(0, prompt)])
    pair.add(make_request(1, prompt, 20))
    transcript = pair.run()
    assert transcript.first(1).cached_tokens == 64
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 20)
    assert_both_idle(pair)


def test_imported_blocks_are_found_by_later_requests(llama: Path) -> None:
    prompt = make_prompt(70)
    pair = make_pair(llama)
    pair.add(make_request(0, prompt, 4))
    pair.run()
    transcript = generate(pair.decode, [make_request(1, prompt, 20)])
    assert transcript.first(1).cached_tokens == 64
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 20)


def test_blocks_leave_while_the_prompt_is_being_computed(llama: Path) -> None:
    pair = make_pair(llama)
    pair.add(make_request(0, make_prompt(100), 4))
    pair.step_decode()
    pair.step_prefill()
    assert {piece.extent.tokens.stop for piece in pair.pieces} == {16}
    assert not pair.first_tokens
    pair.run()
    assert_both_idle(pair)


def test_imports_wait_beside_decodes_and_are_not_stepped(llama: Path) -> None:
    pair = make_pair(llama)
    pair.decode.add(make_request(0, make_prompt(20), 12))
    pair.add(make_request(1, make_prompt(40, seed=1), 8))
    for _ in range(5):
        pair.step_decode()
    assert len(pair.transcript.tokens[0, 0]) == 5
    assert (1, 0) not in pair.transcript.tokens
    transcript = pair.run()
    assert transcript.tokens[0, 0] == reference_greedy(llama, make_prompt(20), 12)
    assert transcript.tokens[1, 0] == reference_greedy(llama, make_prompt(40, seed=1), 8)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_request_of_one_token_ends_with_its_first(llama: Path, tokens_first: bool) -> None:
    pair = make_pair(llama)
    pair.add(make_request(0, make_prompt(40), 1))
    until_first_tokens(pair)
    assert pair.transcript.reasons[0, 0] is FinishReason.LENGTH
    if tokens_first:
        pair.decode.import_tokens(0, pair.first_tokens.pop(0))
    pair.run()
    assert pair.transcript.tokens[0, 0] == reference_greedy(llama, make_prompt(40), 1)
    assert_both_idle(pair)


@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_cancelled_before_its_first_tokens_it_is_computed_here(llama: Path, delivered: int) -> None:
    prompt = make_prompt(70)
    pair = make_pair(llama)
    pair.add(make_request(0, prompt, 20))
    pair.step_decode()
    for _ in range(2):
        pair.step_prefill()
    for _ in range(delivered):
        assert pair.deliver_piece() is False
    pair.prefill.abort(0)
    pair.decode.cancel_import(0)
    while pair.pieces:
        assert pair.deliver_piece() is None
    assert pair.run().tokens[0, 0] == reference_greedy(llama, prompt, 20)
    assert_both_idle(pair)


@pytest.mark.parametrize("n", [1, 3])
def test_cancelled_after_its_first_tokens_it_goes_on_from_them(llama: Path, n: int) -> None:
    request = make_request(0, make_prompt(70), 20, n=n, temperature=1.0, seed=5)
    expected = generate(make_engine(llama), [request]).tokens
    pair = make_pair(llama)
    pair.add(request)
    until_first_tokens(pair)
    pair.deliver_piece()
    pair.decode.import_tokens(0, pair.first_tokens.pop(0))
    pair.prefill.abort(0)
    pair.decode.cancel_import(0)
    while pair.pieces:
        assert pair.deliver_piece() is None
    assert pair.run().tokens == expected
    assert_both_idle(pair)


def test_cancelled_after_a_first_token_that_ended_it_nothing_is_computed(llama: Path) -> None:
    prompt = make_prompt(70)
    free = generate(make_engine(llama), [make_request(0, prompt, 20, n=2, temperature=1.0, seed=5)]).tokens
    stop = free[0, 0][0]
    assert stop not in free[0, 1]
    pair = make_pair(llama)
    pair.add(make_request(0, prompt, 20, n=2, temperature=1.0, seed=5, stop_token_ids=[stop]))
    until_first_tokens(pair)
    pair.decode.import_tokens(0, pair.first_tokens.pop(0))
    pair.prefill.abort(0)
    pair.pieces.clear()
    pair.decode.cancel_import(0)
    assert pair.run().tokens == {(0, 0): [stop], (0, 1): free[0, 1]}
    assert_both_idle(pair)


def test_what_does_not_belong_is_refused_and_not_written(llama: Path) -> None:
    pair = make_pair(llama)
    pair.add(make_request(0, make_prompt(70), 8))
    until_first_tokens(pair)
    reservation, cache = pair.reservations[0], pair.decode.runner.cache
    before = torch.stack(cache.planes)
    generation = reservation.generation

    def imported(id: int, generation: int, extent: Extent) -> bool | None:
        values = torch.ones(cache.layout.size(extent) // 4).view(torch.uint8)
        return pair.decode.import_kv(id, generation, extent, values)

    some = cache.layout.extent(0, 16)
    assert imported(0, generation - 1, some) is None, "an earlier generation"
    assert imported(0, generation + 1, some) is None, "a later generation"
    assert imported(7, generation, some) is None, "another request"
    assert imported(0, generation, cache.layout.extent(70, 1)) is None, "behind the last token"
    assert imported(0, generation, cache.layout.extent(64, 7)) is None, "partly behind the last token"
    assert imported(0, generation, cache.layout.extent(5, 0)) is None, "nothing"
    assert imported(0, generation, msgspec.structs.replace(some, num_layers=3)) is None, "a layer that there is not"
    assert imported(0, generation, msgspec.structs.replace(some, first_head=1)) is None, "a head that there is not"
    assert torch.equal(torch.stack(cache.planes), before)
    piece = pair.pieces[0]
    assert pair.decode.import_kv(0, generation, piece.extent, piece.values) is not None
    written = torch.stack(cache.planes)
    assert not torch.equal(written, before)
    assert imported(0, generation, piece.extent) is None, "what is there already"
    assert torch.equal(torch.stack(cache.planes), written)
    pair.pieces.pop(0)
    assert pair.run().tokens[0, 0] == reference_greedy(llama, make_prompt(70), 8)


@pytest.mark.parametrize("n", [1, 2])
def test_kv_that_is_not_finite_ends_one_request_and_is_not_cached(llama: Path, n: int) -> None:
    prompt, pair = make_prompt(130), make_pair(llama)
    pair.add(make_request(0, prompt, 8, n=n))
    until_first_tokens(pair)
    pair.decode.import_tokens(0, pair.first_tokens.pop(0))
    for piece in pair.pieces:
        piece.values.view(torch.float32).fill_(float("nan"))
    while pair.pieces:
        pair.deliver_piece()
    broken: list[int] = []
    while pair.decode.has_work:
        broken += pair.decode.step().broken
    assert broken == [0]
    assert_both_idle(pair)
    tokens = generate(pair.decode, [make_request(1, prompt, 8)]).tokens[1, 0]
    assert tokens == reference_choices(llama, prompt, tokens)


def test_kv_that_was_imported_is_cached(llama: Path) -> None:
    prompt, pair = make_prompt(130), make_pair(llama)
    pair.add(make_request(0, prompt, 8, n=2))
    pair.run()
    again = generate(pair.decode, [make_request(1, prompt, 8)])
    assert again.first(1).cached_tokens == 128
    assert again.tokens[1, 0] == reference_choices(llama, prompt, again.tokens[1, 0])
    assert_both_idle(pair)


def test_a_piece_for_an_earlier_request_of_the_same_id_is_refused(llama: Path) -> None:
    pair = make_pair(llama)
    pair.add(make_request(0, make_prompt(70), 8))
    until_first_tokens(pair)
    late, old = pair.pieces[0], pair.reservations[0]
    pair.pieces.clear()
    pair.first_tokens.clear()
    for engine in (pair.decode, pair.prefill):
        engine.abort(0)
    pair.transcript.tokens.clear()
    pair.transcript.reasons.clear()
    prompt = make_prompt(70, seed=1)
    pair.add(make_request(0, prompt, 8))
    pair.step_decode()
    assert pair.decode.import_kv(0, old.generation, late.extent, late.values) is None
    assert pair.run().tokens[0, 0] == reference_greedy(llama, prompt, 8)
    assert_both_idle(pair)


def test_an_export_stays_until_it_is_released(llama: Path) -> None:
    pair = make_pair(llama)
    pair.add(make_request(0, make_prompt(70), 8))
    until_first_tokens(pair)
    assert not pair.prefill.has_work
    assert pair.prefill.pool.num_held == 5
    generate(pair.prefill, [make_request(1, make_prompt(30, seed=1))])
    assert pair.prefill.pool.num_held == 5
    pair.prefill.check_integrity()
    pair.prefill.abort(0)
    assert_idle(pair.prefill)


def test_an_exporter_keeps_its_blocks_when_others_need_some(llama: Path) -> None:
    """Exported blocks may still be read, so the decode beside the export is preempted instead."""
    engine = make_engine(llama, block_size=4, num_blocks=12, max_model_len=48, max_num_batched_tokens=3)
    prompt = make_prompt(32)
    engine.add(make_request(0, make_prompt(6, seed=1), 30, priority=0))
    for _ in range(3):
        engine.step()
    engine.add(make_request(1, prompt, 1, priority=1, exports_from=0))
    blocks: list[int] = []
    for _ in range(200):
        for export in engine.step().exports:
            blocks = export.tables[0][: export.extent.tokens.stop // 4]
        if blocks and engine.load().preemptions:
            break
    assert engine.load().preemptions > 0
    [exporting] = engine._sequences[1]
    assert 0 < exporting.computed < len(prompt), "the test is about one that still runs"
    assert exporting.tables[0].blocks[: len(blocks)] == blocks
    engine.abort(1)
    engine.check_integrity()


def test_prompt_logprobs_come_with_the_first_tokens(llama: Path) -> None:
    prompt = make_prompt(40)
    expected = generate(make_engine(llama), [make_request(0, prompt, 4, prompt_logprobs=2)]).first(0)
    pair = make_pair(llama)
    pair.add(make_request(0, prompt, 4, prompt_logprobs=2))
    got = pair.run().first(0)
    assert expected.prompt_logprobs is not None
    assert got.prompt_logprobs is not None
    for ours, theirs in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (ours.token_id, ours.top_token_ids) == (theirs.token_id, theirs.top_token_ids)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_layers_are_exported_before_their_step_is_over(llama: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's runner reports when the first layers are done. KV of steps that are launched ahead is not sent."""
    rng = random.Random(seed)
    requests = [
        make_request(id, make_prompt(rng.choice([3, 30, 64, 90, 100]), seed=id % 5), rng.randint(1, 6))
        for id in range(12)
    ]
    expected = generate(make_engine(llama), requests)
    pretend(monkeypatch)
    monkeypatch.setattr("baton_engine.cuda_runner._GROUP_BYTES", 1)
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "max_model_len": 160}
    pair = Pair(make_engine(llama, block_size=8, **settings), make_engine(llama, block_size=16, **settings), seed)
    for request in requests:
        pair.add(request)
    assert pair.run().tokens == expected.tokens
    assert pair.early > 3
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_kv_of_a_step_that_breaks_is_not_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a prompt are handed out before it is known that the step has computed NaN."""
    prompt = make_prompt(60)
    expected = generate(make_engine(llama), [make_request(0, prompt, 12)]).tokens[0, 0]
    decode = make_engine(llama)
    pretend(monkeypatch)
    monkeypatch.setattr("baton_engine.cuda_runner._GROUP_BYTES", 1)
    pair = Pair(make_engine(llama), decode)
    pair.prefill.runner._model.embedding.weight[prompt[-1]] = float("nan")
    pair.add(make_request(0, prompt, 12))
    pair.step_decode()
    while pair.prefill.has_work:
        pair.step_prefill()
    complete = [pair.deliver_piece() for _ in range(len(pair.pieces))]
    assert complete[-1]
    assert not pair.first_tokens
    decode.cancel_import(0)
    assert pair.run().tokens[0, 0] == expected
    assert generate(decode, [make_request(1, prompt, 12)]).tokens[1, 0] == expected
    assert_both_idle(pair)
