"""/v1/completions: the request to the pod, and the shape of the answer."""

import json
from pathlib import Path

import pytest

from baton_proto import serving_pb2 as pb

from .fake_worker import LENGTH, say
from .harness import Stack, error_of, events, pods, running


async def test_the_whole_answer(stack: Stack):
    stack.pod.cached_tokens = 2
    response = await stack.complete("hello world", max_tokens=50)
    body = response.json()
    assert body["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    tokens = len(stack.ids("hello world"))
    assert body["usage"] == {
        "prompt_tokens": tokens + 1,
        "completion_tokens": tokens + 1,
        "total_tokens": 2 * tokens + 2,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("form", ["string", "ids", "strings", "lists"])
async def test_forms_of_prompts(stack: Stack, form: str):
    first, second = stack.ids("hello"), stack.ids("lazy dog")
    prompts = {"string": "hello", "ids": first, "strings": ["hello", "lazy dog"], "lists": [first, second]}
    body = (await stack.complete(prompts[form], add_special_tokens=False)).json()
    expected = ["hello"] if form in ("string", "ids") else ["hello", "lazy dog"]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert sorted(job.prompt for job in stack.pod.jobs) == sorted([first, second][: len(expected)])


async def test_special_tokens_are_added_unless_told(stack: Stack):
    await stack.complete("hello")
    await stack.complete("hello", add_special_tokens=False)
    begin = stack.model.tokenizer.token_id("<|begin|>")
    assert [job.prompt for job in stack.pod.jobs] == [[begin, *stack.ids("hello")], stack.ids("hello")]


async def test_choices_of_several_prompts_are_numbered_through(stack: Stack):
    body = (await stack.complete(["hello", "world"], n=2)).json()
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "hello"), (1, "hello"), (2, "world"), (3, "world")]
    assert body["usage"]["completion_tokens"] == sum(len(j.prompt) * 2 for j in stack.pod.jobs)


async def test_defaults_come_from_the_generation_config(stack: Stack):
    await stack.complete("hello")
    (job,) = stack.pod.jobs
    sampling = job.submit.sampling
    assert sampling.max_tokens == 16
    assert sampling.temperature == pytest.approx(0.7)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.n) == (40, 0, 1, 1)
    assert list(sampling.eos_token_ids) == [stack.model.tokenizer.token_id("<|end|>"), 77]
    assert not sampling.HasField("logprobs")
    assert not sampling.HasField("prompt_logprobs")


@pytest.mark.processes
@pytest.mark.parametrize("asked", [None, -(2**31), -5, 2**31 - 1])
async def test_a_pod_gets_the_priority_of_the_tenant_alone(
    tmp_path: Path, model_folder: Path, asked: int | None
) -> None:
    """A pod knows no tenants: the priority of a client would let it overtake all others there."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {"default": {"priority": 10}}}))
    async with pods() as decodes, running(model_folder, decodes, tenants_file=tenants, api_keys=["sk"]) as stack:
        stack.http.headers["authorization"] = "Bearer sk"
        assert (await stack.complete(priority=asked)).status_code == 200
        assert (await stack.pod.job()).submit.priority == 10


async def test_every_sampling_field_reaches_the_pod(stack: Stack):
    response = await stack.complete(
        "hello",
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "6": 2.5},
        allowed_token_ids=[1, 2, 3],
        stop_token_ids=[9],
        ignore_eos=True,
        seed=-1,
        n=2,
        best_of=2,
        logprobs=3,
        prompt_logprobs=4,
        priority=-7,
        user="someone",
        unheard_of={"a": 1},
    )
    assert response.status_code == 200
    (job,) = stack.pod.jobs
    assert job.submit.request_id == response.headers["x-request-id"]
    assert job.submit.prefill_addresses == []
    assert job.submit.sampling == pb.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={5: -100, 6: 2.5},
        allowed_token_ids=[1, 2, 3],
        stop_token_ids=[9],
        seed=2**64 - 1,
        n=2,
        logprobs=3,
        prompt_logprobs=4,
    )


async def test_null_means_left_out(stack: Stack):
    nulls = dict.fromkeys(["n", "stop", "temperature", "logprobs", "seed", "stream", "logit_bias", "max_tokens"])
    assert (await stack.complete("hello", **nulls)).json()["choices"][0]["text"] == "hello"


async def test_seeds_differ_when_not_given(stack: Stack):
    await stack.complete("hello")
    await stack.complete("hello")
    first, second = (job.submit.sampling.seed for job in stack.pod.jobs)
    assert first != second


async def test_top_k_minus_one_is_off_and_top_p_zero_keeps_one_token(stack: Stack):
    await stack.complete("hello", top_k=-1, top_p=0)
    (job,) = stack.pod.jobs
    assert job.submit.sampling.top_k == 0
    assert 0 < job.submit.sampling.top_p < 1e-5


async def test_bad_words_at_the_beginning_and_after_a_space(stack: Stack):
    await stack.complete("hello", bad_words=["fox"])
    (job,) = stack.pod.jobs
    sequences = [list(sequence.token_ids) for sequence in job.submit.sampling.bad_words]
    bare, spaced = stack.ids("fox"), stack.ids(" fox")
    assert sequences == [bare, spaced] if len(bare) == len(spaced) else [bare]


@pytest.mark.parametrize("keep", [2, -1])
async def test_truncation_keeps_the_end(stack: Stack, keep: int):
    prompt = [100 + i % 300 for i in range(stack.pod.max_model_len + 5)]
    response = await stack.complete(prompt, truncate_prompt_tokens=keep, max_tokens=3)
    assert response.status_code == 200
    (job,) = stack.pod.jobs
    assert job.prompt == (prompt[-2:] if keep == 2 else prompt[-(stack.pod.max_model_len - 3) :])


async def test_context_length(stack: Stack):
    limit = stack.pod.max_model_len
    assert (await stack.complete([100] * (limit - 16))).status_code == 200
    error = error_of(await stack.complete([100] * (limit - 15)))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert str(limit) in error["message"]
    assert str(limit + 1) in error["message"]


async def test_token_ids_come_back_when_asked(stack: Stack):
    body = (await stack.complete("hello", return_token_ids=True)).json()
    (job,) = stack.pod.jobs
    assert body["choices"][0]["prompt_token_ids"] == job.prompt
    assert body["choices"][0]["token_ids"] == job.prompt


async def test_logprobs(stack: Stack):
    ids = stack.ids("hello fox")
    stack.pod.script = say(ids)
    logprobs = (await stack.complete("x", logprobs=2)).json()["choices"][0]["logprobs"]
    name = stack.model.tokenizer.token_text
    assert logprobs["tokens"] == [name(token) for token in ids]
    assert "".join(logprobs["tokens"]) == "hello fox"
    assert logprobs["token_logprobs"] == [-1.0] * len(ids)
    assert logprobs["top_logprobs"] == [{name(token): -1.0, name(token + 1): -2.0} for token in ids]
    starts = [len("".join(logprobs["tokens"][:i])) for i in range(len(ids))]
    assert logprobs["text_offset"] == starts


async def test_logprobs_of_parts_of_characters(stack: Stack):
    byte_tokens = [stack.model.tokenizer.token_id(char) for char in "ðŁĺĢ"]  # 😀 in GPT-2's letters for bytes
    stack.pod.script = say([*stack.ids("a"), *byte_tokens, *stack.ids("b")])
    choice = (await stack.complete("x", logprobs=0)).json()["choices"][0]
    assert choice["text"] == "a😀b"
    parts = [rf"bytes:\x{byte:02x}" for byte in "😀".encode()]
    assert choice["logprobs"]["tokens"] == ["a", *parts, "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["a"]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring_a_given_text(stack: Stack, max_tokens: int):
    """Evaluation harnesses send ids, echo, logprobs and read the prompt's log probabilities."""
    ids = stack.ids("hello lazy dog")
    response = await stack.complete(ids, echo=True, logprobs=1, max_tokens=max_tokens)
    body = response.json()
    (job,) = stack.pod.jobs
    assert job.submit.sampling.max_tokens == 1
    assert job.submit.sampling.prompt_logprobs == 1
    (choice,) = body["choices"]
    generated = ids[:max_tokens]
    assert choice["text"] == "hello lazy dog" + stack.model.tokenizer.decode(generated, True)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [stack.model.tokenizer.token_text(token) for token in ids + generated]
    assert logprobs["token_logprobs"] == [None] + [-1.0] * (len(ids) + max_tokens - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][-1] == len("".join(logprobs["tokens"][:-1]))
    assert body["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


async def test_echo_without_logprobs_gives_the_text_as_sent(stack: Stack):
    stack.pod.script = say(stack.ids(" fox"))
    body = (await stack.complete(["hello", "lazy"], echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["hello fox", "lazy fox"]
    assert not stack.pod.jobs[0].submit.sampling.HasField("prompt_logprobs")


async def test_prompt_logprobs(stack: Stack):
    ids = stack.ids("hello fox")
    choice = (await stack.complete(ids, prompt_logprobs=1)).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    name = stack.model.tokenizer.token_text
    assert rest == [{str(token): {"logprob": -1.0, "rank": 1, "decoded_token": name(token)}} for token in ids[1:]]


async def test_infinite_logprobs_are_numbers(stack: Stack):
    async def script(job):
        logprobs = [pb.TokenLogprobs(token_id=5, logprob=float(value)) for value in ("-inf", "nan")]
        await job.send(job.delta([5, 5], finish=LENGTH, logprobs=logprobs))

    stack.pod.script = script
    logprobs = (await stack.complete("x", logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0, -9999.0]


async def test_stream(stack: Stack):
    response = await stack.complete("hello lazy dog", stream=True, max_tokens=50)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "text_completion"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hello lazy dog"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in c for c in chunks)


async def test_no_text_ends_a_line_of_a_stream(stack: Stack):
    """httpx, as str.splitlines, ends lines at characters that end none of an event."""
    text = "a\u0085b\u2028c\u2029d\x1ce\x0bf\rg\ni"
    response = await stack.complete(text, stream=True, max_tokens=50)
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]) == text


async def test_streamed_echo_logprobs_and_ids(stack: Stack):
    ids = stack.ids("hello fox")
    chunks = events(await stack.complete(ids, stream=True, echo=True, logprobs=0, return_token_ids=True, max_tokens=2))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert parts[0]["text"] == "hello fox"
    assert parts[0]["prompt_token_ids"] == ids
    assert parts[0]["logprobs"]["token_logprobs"][0] is None
    assert [token for part in parts for token in part.get("token_ids", [])] == ids[:2]
    streamed = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    whole = (await stack.complete(ids, echo=True, logprobs=0, max_tokens=2)).json()["choices"][0]
    assert streamed == whole["logprobs"]["text_offset"]
    assert "".join(part["text"] for part in parts) == whole["text"]


async def test_streamed_choices_interleave_by_index(stack: Stack):
    chunks = events(await stack.complete(["hello fox", "lazy dog"], stream=True, n=2, max_tokens=50))
    texts: dict[int, str] = {}
    finishes: dict[int, int] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        finishes[choice["index"]] = finishes.get(choice["index"], 0) + (choice["finish_reason"] is not None)
    assert texts == {0: "hello fox", 1: "hello fox", 2: "lazy dog", 3: "lazy dog"}
    assert finishes == dict.fromkeys(range(4), 1)


async def test_usage_in_streams(stack: Stack):
    options = {"include_usage": True}
    chunks = events(await stack.complete("hello fox", stream=True, stream_options=options))
    *others, last = chunks
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert last["choices"] == []
    count = len(stack.pod.jobs[0].prompt)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (count, count)

    options["continuous_usage_stats"] = True
    chunks = events(await stack.complete("hello fox", stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1 or counts[0] < counts[-1]
    assert counts[-1] == count
