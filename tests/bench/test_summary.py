"""Figures from answers."""

import random
from statistics import quantiles

import pytest

from baton_bench.answer import Answer, AnswerReader
from baton_bench.load import LoadResult
from baton_bench.plan import Plan, Session, Turn
from baton_bench.pod_watch import sample
from baton_bench.summary import Slo, percentile, summarize


def answered(due: float, first: float, gap: float, tokens: int, **fields: object) -> Answer:
    answer = Answer(due, 10, tokens, sent=due, tokens=tokens, prompt_tokens=10, outcome="completed")
    answer.events = [(due + first + i * gap, 1) for i in range(tokens)]
    answer.end = answer.events[-1][0]
    for name, value in fields.items():
        setattr(answer, name, value)
    return answer


def test_percentiles_are_those_of_the_standard_library() -> None:
    values = sorted(random.Random(0).random() for _ in range(137))
    expected = quantiles(values, n=100, method="inclusive")
    assert [percentile(values, p) for p in range(1, 100)] == pytest.approx(expected)
    assert (percentile(values, 0), percentile(values, 100)) == (values[0], values[-1])
    assert percentile([3.0], 99) == 3.0


def test_tokens_that_come_together_share_their_time() -> None:
    answer = Answer(1.0, 4, 6, tokens=6, events=[(1.5, 1), (1.9, 4), (2.0, 1)], end=2.0, outcome="completed")
    assert answer.ttft == 0.5
    assert answer.gaps == pytest.approx([0.1] * 5)
    assert answer.tpot == pytest.approx(0.1)
    assert answer.e2e == 1.0


def test_goodput_counts_requests_that_meet_both() -> None:
    answers = [
        answered(0, 0.1, 0.02, 11),
        answered(1, 0.3, 0.02, 11),  # late
        answered(2, 0.1, 0.05, 11),  # slow
        answered(3, 0.1, 0.02, 1),  # no time per token
        answered(4, 0.1, 0.02, 11, outcome="cancelled"),
        answered(5, 0.1, 0.02, 11, outcome="failed", error="timeout", detail="after 1 s"),
    ]
    plan = Plan("load", 6.0, [Session(answer.due, [Turn([1], 1)]) for answer in answers])
    summary = summarize(LoadResult("target", plan, answers), Slo(200, 30))
    assert summary["goodput_req_s"] == pytest.approx(2 / 6)
    assert summary["slo_share"] == pytest.approx(2 / 6)
    assert summary["offered_req_s"] == 1.0
    assert (summary["completed"], summary["cancelled"], summary["failed"]) == (4, 1, 1)
    assert summary["errors"] == {"timeout": 1}
    assert summary["ttft_ms"]["p50"] == pytest.approx(100)
    assert summary["ttft_ms"]["max"] == pytest.approx(300)
    loose = summarize(LoadResult("target", plan, answers), Slo(None, 30))
    assert loose["goodput_req_s"] == pytest.approx(3 / 6)
    assert "goodput_req_s" not in summarize(LoadResult("target", plan, answers), Slo())


def feed(*pieces: bytes) -> tuple[Answer, AnswerReader]:
    answer = Answer(0.0, 4, 5)
    reader = AnswerReader(answer, began=10.0)
    for number, piece in enumerate(pieces):
        reader.feed(piece, 11.0 + number)
    return answer, reader


def event(text: str, completion: int | None = None, choices: bool = True) -> bytes:
    usage = f',"usage":{{"prompt_tokens":4,"completion_tokens":{completion}}}' if completion is not None else ""
    choice = f'{{"index":0,"text":"{text}"}}' if choices else ""
    return f'data: {{"choices":[{choice}]{usage}}}\n\n'.encode()


def test_chunks_have_the_tokens_that_the_server_counts() -> None:
    stream = event("", 0) + event("a", 1) + event("bcd", 4) + event("", 5) + event("", 5, choices=False)
    cut = stream.index(b"bcd")
    answer, reader = feed(stream[:cut], stream[cut:] + b"data: [DONE]\r\n\r\n")
    assert answer.events == [(1.0, 1), (2.0, 3), (2.0, 1)]
    assert (answer.tokens, answer.prompt_tokens) == (5, 4)
    assert reader.by_token
    assert reader.done
    assert "".join(reader.said) == "abcd"


def test_without_counts_a_chunk_is_a_token() -> None:
    answer, reader = feed(event("a"), event("bcd"), event("", 4, choices=False), b"data: [DONE]\n\n")
    assert answer.events == [(1.0, 1), (2.0, 1)]
    assert answer.tokens == 4
    assert not reader.by_token


def test_an_error_in_the_stream_fails_the_request() -> None:
    answer, _ = feed(event("a", 1), b'data: {"error": {"message": "gone"}}\n\n')
    assert (answer.outcome, answer.error) == ("failed", "error in the stream")
    assert "gone" in answer.detail


def test_pods_are_added_up() -> None:
    pods = [
        {"role": "decode", "requests": 3, "queued_prefill_tokens": 5, "blocks_held": 10, "blocks": 100},
        {"role": "decode", "requests": 1, "queued_prefill_tokens": 0, "blocks_held": 20, "blocks": 100},
        {"role": "prefill", "requests": 9, "queued_prefill_tokens": 70, "blocks_held": 0, "blocks": 0},
    ]
    found = sample(1.0, pods)
    assert (found.queued_tokens, found.requests) == (75, 4)
    assert found.kv == {"decode": 0.15, "prefill": 0.0}
