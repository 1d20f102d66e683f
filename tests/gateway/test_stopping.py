"""How choices end."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_gateway.answers.choice import Choice, Piece
from baton_gateway.models.detokenizer import read_pieces
from baton_proto import serving_pb2 as pb

from .fake_worker import LENGTH, NONE, STOP, hang, say
from .harness import Stack, events
from .test_stop import oracle
from .tiny_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PIECES = read_pieces(TOKENIZER)


async def test_a_stop_string_across_tokens_cancels_on_the_pod(stack: Stack):
    ids = stack.ids("hello lazy dog and fox")
    stack.pod.script = hang(*ids)
    response = await stack.complete("x", stop=["zy do", "never"], max_tokens=100)
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello la", "stop", "zy do")
    job = await stack.pod.job()
    await job.cancelled.wait()
    used = response.json()["usage"]["completion_tokens"]
    tokenizer = stack.model.tokenizer
    assert "zy do" in tokenizer.decode(ids[:used], True)
    assert "zy do" not in tokenizer.decode(ids[: used - 1], True)


@pytest.mark.parametrize("include", [True, False])
async def test_streamed_stop_string(stack: Stack, include: bool):
    stack.pod.script = hang(*stack.ids("hello lazy dog"))
    chunks = events(await stack.complete("x", stop="azy", stream=True, include_stop_str_in_output=include))
    assert "".join(c["choices"][0]["text"] for c in chunks) == ("hello lazy" if include else "hello l")
    assert chunks[-1]["choices"][0]["stop_reason"] == "azy"
    await (await stack.pod.job()).cancelled.wait()


async def test_only_the_beginning_of_a_stop_string_is_held_back(stack: Stack):
    """The text before a possible stop arrives while the pod is still silent about the rest."""
    stack.pod.script = hang(*stack.ids("hello la"))
    async with stack.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stop": "lazy", "stream": True}
    ) as response:
        text = ""
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                text += line
            if "hello " in text.replace('"', "") or ": ping" in line:
                break
    assert '"text":"he"' in text or '"text":"hello' in text
    assert '"text":"la"' not in text


async def test_one_choice_stops_and_the_other_goes_on(stack: Stack):
    stopping, going = stack.ids("lazy STOP dog"), stack.ids("hello world fox " * 4)

    async def script(job):
        for position in range(max(len(stopping), len(going))):
            deltas = []
            for choice, ids in enumerate((stopping, going)):
                if position < len(ids):
                    finish = STOP if position == len(ids) - 1 else NONE
                    deltas.append(job.delta([ids[position]], choice=choice, finish=finish))
            await job.send(*deltas)
            if position == len(stopping) - 2:
                # All of the stop string has been said; only its choice is to end on the pod.
                async with asyncio.timeout(5):
                    while not job.cancelled_choices:
                        await asyncio.sleep(0.01)

    stack.pod.script = script
    body = (await stack.complete("x", n=2, stop="STOP")).json()
    assert [choice["text"] for choice in body["choices"]] == ["lazy ", "hello world fox " * 4]
    assert [choice["stop_reason"] for choice in body["choices"]] == ["STOP", None]
    assert stack.pod.jobs[-1].cancelled_choices == [0]
    assert not stack.pod.jobs[-1].cancelled.is_set()


async def test_end_of_sequence_is_counted_but_not_shown(stack: Stack):
    end = stack.model.tokenizer.token_id("<|end|>")
    ids = [*stack.ids("hello"), end]
    stack.pod.script = say(ids)
    body = (await stack.complete("x", skip_special_tokens=False)).json()
    assert body["choices"][0]["text"] == "hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert body["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("include", [True, False])
async def test_stop_token_ids(stack: Stack, include: bool):
    ids = stack.ids("hello fox")
    stack.pod.script = say(ids, stop_token_id=ids[-1])
    body = (await stack.complete("x", stop_token_ids=[ids[-1]], include_stop_str_in_output=include)).json()
    (choice,) = body["choices"]
    assert choice["text"] == stack.model.tokenizer.decode(ids if include else ids[:-1], True)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])


async def test_length(stack: Stack):
    stack.pod.script = say(stack.ids("hello"), finish=LENGTH)
    (choice,) = (await stack.complete("x")).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


async def test_no_stop_string_before_min_tokens(stack: Stack):
    ids = stack.ids("a b a b a b")
    stack.pod.script = say(ids)
    body = (await stack.complete("x", stop="a", min_tokens=3)).json()
    text = body["choices"][0]["text"]
    early = stack.model.tokenizer.decode(ids[:3], True)
    assert text.startswith(early)
    assert "a" in early
    assert "a" not in text[len(early) :]
    assert body["choices"][0]["stop_reason"] == "a"


async def test_many_tokens_in_one_step(stack: Stack):
    ids = stack.ids("hello lazy dog and fox")
    stack.pod.script = say(ids, step=len(ids))
    response = await stack.complete("x", stop="dog", logprobs=0)
    (choice,) = response.json()["choices"]
    used = response.json()["usage"]["completion_tokens"]
    assert choice["text"] == "hello lazy "
    assert used < len(ids)
    assert len(choice["logprobs"]["tokens"]) == used


@given(
    text=st.text("abc é🎊", max_size=30),
    stops=st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
    include=st.booleans(),
    logprobs=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_choice_like_the_oracle(text, stops, size, include, logprobs):
    """Whatever the split into deltas, text and reason are those of reading the whole text."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    choice = Choice(PIECES.detokenizer(True), stops=stops, include_stop=include)
    total = Piece()
    deltas = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
    for position, tokens in enumerate(deltas):
        delta = pb.Delta(
            token_ids=tokens,
            logprobs=[pb.TokenLogprobs(token_id=token) for token in tokens] if logprobs else [],
            finish_reason=STOP if position == len(deltas) - 1 else NONE,
        )
        total.extend(choice.feed(delta))
        if choice.finish_reason is not None:
            break
    expected, stop = oracle(text, stops, include)
    assert (total.text, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)
    assert choice.tokens == len(total.token_ids)
    if stop is None:
        assert total.token_ids == ids
    else:
        assert stop not in TOKENIZER.decode(ids[: choice.tokens - 1]) or choice.tokens == 1
    if logprobs:
        assert [token.token_id for token in total.logprobs] == total.token_ids
