"""Masks of clients' grammars that take too long fail alone, and their tenant waits before it has more of them."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from baton_common.cache_scope import CacheScope
from baton_engine import timed_masks
from baton_engine.grammars import Grammars
from baton_engine.masks import Masks
from baton_engine.matcher import Matcher
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.sequence import FinishReason, Sequence
from tests.models import make_tokenizer

from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request
from .test_cuda_runner import pretend

TOKENIZER = make_tokenizer()
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
LARK = 'start: "a" | "b"'

Make = Callable[..., Sequence]


@pytest.fixture
def make(llama: Path) -> Make:
    grammars = Grammars(llama, len(TOKENIZER))

    def make(salt: bytes, kind: GrammarKind = GrammarKind.EBNF, text: str = LARK) -> Sequence:
        grammar = Grammar(kind, text, "grammar")
        request = make_request(0, [1, 2], 8, grammar=grammar, cache_scope=CacheScope(salt))
        sequence = Sequence(request, 0, 16, 64)
        sequence.matcher = grammars.compile(grammar).result().copy()
        return sequence

    return make


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Matcher]]:
    """Matchers whose masks take until the test has ended."""
    matchers: list[Matcher] = []
    ended, fill = threading.Event(), Matcher.fill

    def wait_and_fill(matcher: Matcher, mask: np.ndarray) -> None:
        if any(matcher is each for each in matchers):
            ended.wait()
        fill(matcher, mask)

    monkeypatch.setattr(Matcher, "fill", wait_and_fill)
    monkeypatch.setattr(timed_masks, "_MOST_SECONDS", 0.3)
    yield matchers
    ended.set()


def allowed(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TOKENIZER)]
    return bits.nonzero()[0].tolist()


def test_a_mask_that_takes_too_long_fails_alone(make: Make, stuck: list[Matcher]) -> None:
    # More of them than threads, and the masks of another tenant wait behind them.
    slow = [make(b"slow") for _ in range(6)]
    others = [make(b"other"), make(b"slow", GrammarKind.REGEX, "b"), make(b"other")]
    stuck += [sequence.matcher for sequence in slow]
    masks = Masks(len(TOKENIZER)).compute([*slow, *others])
    assert [sequence.matcher.failed for sequence in (*slow, *others)] == [True] * 6 + [False] * 3
    assert [allowed(mask) for mask in masks[6:]] == [sorted([A, B]), [B], sorted([A, B])]
    assert all(len(allowed(mask)) == len(TOKENIZER) for mask in masks[:6])


def test_its_tenant_has_no_such_grammar_for_a_while(
    make: Make, stuck: list[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, slow = Masks(len(TOKENIZER)), make(b"slow")
    stuck.append(slow.matcher)
    masks.compute([slow])
    assert [masks.refuses(make(salt)) for salt in (b"slow", b"other")] == [True, False]
    assert not masks.refuses(make(b"slow", GrammarKind.REGEX, "b"))
    running, other = make(b"slow"), make(b"other")
    began = time.monotonic()
    masks.compute([running, other])
    assert running.matcher.failed
    assert not other.matcher.failed
    monkeypatch.setattr(time, "monotonic", lambda: began + 61)
    assert not masks.refuses(make(b"slow"))


def test_few_threads_go_on_with_masks_that_were_given_up(make: Make, stuck: list[Matcher]) -> None:
    masks = Masks(len(TOKENIZER))
    slow = [make(b"%d" % tenant) for tenant in range(timed_masks._MOST_GIVEN_UP)]
    for sequence in slow:
        stuck.append(sequence.matcher)
        assert not masks.refuses(make(b"other"))
        masks.compute([sequence])
    assert masks.refuses(make(b"other"))
    assert not masks.refuses(make(b"other", GrammarKind.REGEX, "b"))


def test_threads_that_end_late_leave_as_many_as_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_masks, "_MOST_SECONDS", 0.1)
    before, masks, ended = set(threading.enumerate()), Masks(len(TOKENIZER)), threading.Event()
    fill, slow = Matcher.fill, make(b"slow")

    def threads() -> int:
        return sum(each.name == "timed-masks" for each in set(threading.enumerate()) - before)

    def wait_and_fill(matcher: Matcher, mask: np.ndarray) -> None:
        if matcher is slow.matcher:
            ended.wait()
        fill(matcher, mask)

    monkeypatch.setattr(Matcher, "fill", wait_and_fill)
    masks.compute([slow])
    assert threads() == timed_masks._MOST_THREADS + 1
    ended.set()
    while threads() > timed_masks._MOST_THREADS:
        time.sleep(0.01)
    assert allowed(masks.compute([make(b"other")])[0]) == sorted([A, B])


@pytest.mark.parametrize("gpu", [False, True])
def test_requests_of_a_grammar_whose_masks_take_minutes(
    llama: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """After the "c" the "b" of a mask ends all rules, in as many places as there are letters before it."""
    monkeypatch.setattr(timed_masks, "_MOST_SECONDS", 0.3)
    if gpu:
        pretend(monkeypatch)
    count = 300
    rules = "".join(f"\nx{index}: A x{index} | C B" for index in range(count))
    text = "start: " + " | ".join(f"x{index}" for index in range(count)) + rules + '\nA: "a"\nC: "c"\nB: "b"'
    engine = make_engine(llama)
    grammar = Grammar(GrammarKind.EBNF, text, "grammar")
    # The output so far is what another pod has generated.
    slow = make_request(0, make_prompt(20), 450, output=[A] * 400 + [C], grammar=grammar, cache_scope=CacheScope(b"s"))
    fast = make_request(1, make_prompt(20), 30, cache_scope=CacheScope(b"f"))
    alone = generate(make_engine(llama), [fast]).tokens[1, 0]
    engine.add(slow)
    engine.add(fast)
    transcript = Transcript()
    transcript.expect(slow)
    transcript.expect(fast)
    finish(engine, transcript)
    assert transcript.reasons[0, 0] is FinishReason.ERROR
    assert transcript.tokens[1, 0] == alone
    engine.add(make_request(2, make_prompt(5), 5, grammar=grammar, cache_scope=CacheScope(b"s")))
    rejections = []
    while engine.has_work:
        rejections += engine.step().rejections
    assert [(id, field) for id, field, _ in rejections] == [(2, "grammar")]
    assert "too long" in rejections[0][2]
    assert_idle(engine)
