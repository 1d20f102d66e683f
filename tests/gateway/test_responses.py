"""POST /v1/responses: the pod gets the same request as for a chat, and its tokens become a response."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from tokenizers import Tokenizer

from baton_proto import serving_pb2 as pb

from .fake_worker import LENGTH, Job, failing, hang, say
from .harness import Stack, error_of, pods, response_events, running
from .tiny_models import write_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Now", "parameters": CITY, "strict": True},
    {"type": "function", "name": "get_time"},
]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {k: t[k] for k in t if k != "type"}} for t in TOOLS]
ARGUMENTS = '{"city": "Köln \\"}] , {\\\\"}'
CALLS = '[{"name": "weather", "arguments": ' + ARGUMENTS + '}, {"name": "get_time", "arguments": {}}]'
EVENTS = pydantic.TypeAdapter[Any](ResponseStreamEvent)
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}


def without_repeats(events: list[Any]) -> list[str]:
    """Return the types of events, runs of deltas as one."""
    types = [event["type"] for event in events]
    return [t for i, t in enumerate(types) if i == 0 or t != types[i - 1] or not t.endswith(".delta")]


async def streamed(stack: Stack, input: Any = "hello", **fields: Any) -> list[Any]:
    """Ask for a stream; each event is checked against the official client's types."""
    events = response_events(await stack.respond(input, stream=True, **fields))
    for event in events:
        EVENTS.validate_python(event, strict=False)
    return events


def jobs_alike(stack: Stack) -> bool:
    """Return whether the pod was asked for the same twice, but for the random seed."""
    one, other = (job.submit for job in stack.pod.jobs)
    one.sampling.seed = other.sampling.seed
    return bool((one.prompt_token_ids, one.sampling) == (other.prompt_token_ids, other.sampling))


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        (
            {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "ignore_eos": True},
            {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "ignore_eos": True},
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 2}, {}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": schema_format(CITY)}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": CITY}}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"tools": TOOLS}, {"tools": CHAT_TOOLS}),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"seed": 5, "stop": "x", "n": 3}, {"seed": 5, "stop": "x"}),
        ({"priority": 3, "logit_bias": {"5": 1}}, {"priority": 3, "logit_bias": {"5": 1}}),
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_the_pod_is_told_what_a_chat_tells_it(stack: Stack, fields: Any, chat: Any) -> None:
    stack.pod.script = say(stack.ids("{}"))
    assert (await stack.respond("hello", **fields)).status_code == 200
    assert (await stack.chat("hello", **chat)).status_code == 200
    for job in stack.pod.jobs:
        job.submit.sampling.grammar.param = ""  # what the field is called is another matter
    assert jobs_alike(stack)
    assert stack.pod.jobs[0].submit.priority == stack.pod.jobs[1].submit.priority


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
TURNS: list[Any] = [
    {"role": "developer", "content": "be kind"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("weather", "please")]},
    {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    | {"content": [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}]},
    {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call", "call_id": "call_2", "name": "get_time", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": ""},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "thanks"},
]
CHAT_TURNS: list[Any] = [
    {"role": "system", "content": "in short"},
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "weather\nplease"},
    {"role": "assistant", "content": "I look", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": ""},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.processes
async def test_turns_reach_the_template_as_a_chat_has_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ mood }}"
    folder = write_model(tmp_path / "turns", tokenizer, template=template)
    more = {"chat_template_kwargs": {"mood": "calm"}, "temperature": 1}
    async with pods(max_model_len=4096) as decodes, running(folder, decodes) as stack:
        response = await stack.respond(TURNS, instructions="in short", tools=TOOLS, **more)
        assert response.status_code == 200, response.text
        assert (await stack.chat(messages=CHAT_TURNS, tools=CHAT_TOOLS, **more)).status_code == 200
        one, other = (stack.prompt(number) for number in range(2))
        assert one == other
        assert json.JSONDecoder().raw_decode(one)[0][3]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
        (await stack.respond(TURNS, tools=TOOLS, tool_choice="none", **more)).raise_for_status()
        assert stack.prompt(2).endswith("nullcalm")


async def test_a_whole_response(stack: Stack) -> None:
    stack.pod.script = say(stack.ids("lazy fox"))
    stack.pod.cached_tokens = 4
    asked: dict[str, Any] = {
        "instructions": "be kind",
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "you",
        "prompt_cache_key": "key",
        "store": True,
        "top_p": 0.5,
        "max_output_tokens": 50,
        "tools": TOOLS,
        "text": {"format": schema_format(CITY)},
        "unheard_of": 1,
    }
    response = await stack.respond(**asked, previous_response_id=None)
    body = response.json()
    official = OfficialResponse.model_validate(body, strict=False)
    assert official.output_text == "lazy fox"
    request_id = response.headers["x-request-id"]
    message = {
        "id": f"msg_{request_id}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "lazy fox", "annotations": [], "logprobs": []}],
    }
    prompt, output = len(stack.pod.jobs[0].prompt), len(stack.ids("lazy fox"))
    expected = {
        "id": f"resp_{request_id}",
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [message],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        },
        "store": False,
        "background": False,
        "previous_response_id": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "temperature": 0.7,
        "top_logprobs": 0,
        "truncation": "disabled",
        "tools": [TOOLS[0], {**TOOLS[1], "description": None, "parameters": None, "strict": None}],
        **{name: asked[name] for name in ("instructions", "metadata", "user", "safety_identifier", "prompt_cache_key")},
        **{name: asked[name] for name in ("top_p", "max_output_tokens", "text")},
    }
    assert {name: body[name] for name in expected} == expected
    assert "user" not in (await stack.respond()).json()
    assert 0 <= body["completed_at"] - body["created_at"] < 10


@pytest.mark.parametrize("step", [1, 2, 1000])
async def test_a_stream(stack: Stack, step: int) -> None:
    text = 'quotes " and \\ and \n\t\u2028 é 🎊'
    stack.pod.script = say(stack.ids(text), step=step)
    events = await streamed(stack, metadata={"a": "b"})
    assert without_repeats(events) == TEXT_EVENTS
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
    created, *_, text_done, part_done, item_done, completed = events
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert "usage" not in created["response"]
    assert text_done["text"] == part_done["part"]["text"] == text
    assert completed["response"]["output"] == [item_done["item"]]
    assert len({e["item_id"] for e in events if "item_id" in e} | {item_done["item"]["id"]}) == 1
    assert len({e["response"]["id"] for e in events if "response" in e}) == 1
    whole = (await stack.respond(metadata={"a": "b"})).json()
    final = completed["response"]
    for body in (whole, final):
        for name in ("id", "created_at", "completed_at"):
            assert body.pop(name)
        body["output"][0].pop("id")
    assert whole == final


async def test_the_stream_ends_without_done(stack: Stack) -> None:
    assert "[DONE]" not in (await stack.respond(stream=True)).text


async def test_no_text_at_all(stack: Stack) -> None:
    stack.pod.script = say([])
    assert (await stack.respond()).json()["output"][0]["content"][0]["text"] == ""
    assert without_repeats(await streamed(stack)) == [t for t in TEXT_EVENTS if not t.endswith(".delta")]


async def test_an_answer_cut_short_is_incomplete(stack: Stack) -> None:
    body = (await stack.respond("hello there", max_output_tokens=3)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["completed_at"] is None
    *_, item_done, last = await streamed(stack, "hello there", max_output_tokens=3)
    assert item_done["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["usage"]["output_tokens"] == 3


async def test_logprobs(stack: Stack) -> None:
    stack.pod.script = say(stack.ids("lazy fox"))
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    chat = (await stack.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert len(chat) == len(stack.ids("lazy fox"))
    body = (await stack.respond(**fields)).json()
    assert body["output"][0]["content"][0]["logprobs"] == chat
    assert body["top_logprobs"] == 2
    events = await streamed(stack, **fields)
    assert [e for d in events if d["type"] == "response.output_text.delta" for e in d["logprobs"]] == chat
    [done] = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == chat


async def test_required_calls(stack: Stack) -> None:
    stack.pod.script = say(stack.ids(CALLS))
    body = (await stack.respond(tools=TOOLS, tool_choice="required")).json()
    assert OfficialResponse.model_validate(body).output_text == ""
    assert body["tool_choice"] == "required"
    calls = [(item["type"], item["status"], item["name"], item["arguments"]) for item in body["output"]]
    assert calls == [
        ("function_call", "completed", "weather", ARGUMENTS),
        ("function_call", "completed", "get_time", "{}"),
    ]
    assert len({item["id"] for item in body["output"]} | {item["call_id"] for item in body["output"]}) == 4


@pytest.mark.parametrize("step", [1, 4, 1000])
async def test_streamed_calls(stack: Stack, step: int) -> None:
    stack.pod.script = say(stack.ids(CALLS), step=step)
    events = await streamed(stack, tools=TOOLS, tool_choice="required")
    start = ["response.created", "response.in_progress"]
    assert without_repeats(events) == [*start, *CALL_EVENTS, *CALL_EVENTS, "response.completed"]
    for index, (name, arguments) in enumerate((("weather", ARGUMENTS), ("get_time", "{}"))):
        added, *deltas, done, item_done = [e for e in events if e.get("output_index") == index]
        assert added["item"]["arguments"] == ""
        assert added["item"]["status"] == "in_progress"
        assert "".join(e["delta"] for e in deltas) == done["arguments"] == arguments
        assert done["name"] == name
        assert {e["item_id"] for e in (*deltas, done)} == {added["item"]["id"]}
        assert item_done["item"] == added["item"] | {"arguments": arguments, "status": "completed"}
        assert events[-1]["response"]["output"][index] == item_done["item"]


async def test_a_named_call(stack: Stack) -> None:
    choice = {"type": "function", "name": "weather"}
    stack.pod.script = say(stack.ids(ARGUMENTS), step=3)
    body = (await stack.respond(tools=TOOLS, tool_choice=choice)).json()
    [call] = body["output"]
    assert (call["name"], call["arguments"], body["tool_choice"]) == ("weather", ARGUMENTS, choice)
    stack.pod.script = say(stack.ids(ARGUMENTS)[:5], finish=LENGTH)
    *_, item_done, last = await streamed(stack, tools=TOOLS, tool_choice=choice)
    assert (item_done["item"]["status"], last["type"]) == ("incomplete", "response.incomplete")
    assert ARGUMENTS.startswith(item_done["item"]["arguments"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_pod_that_refuses_a_schema_names_the_field(stack: Stack, stream: bool) -> None:
    async def refuse(job: Job) -> None:
        await job.fail(pb.Failure.CODE_INVALID, "cannot", job.submit.sampling.grammar.param)

    stack.pod.script = refuse
    for format, param in ((schema_format(CITY), "text.format.schema"), ({"type": "json_object"}, "text.format")):
        response = await stack.respond(text={"format": format}, stream=stream)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.processes
async def test_a_template_that_refuses_names_the_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_model(tmp_path / "strict", tokenizer, template="{{ raise_exception('no') }}")
    async with pods() as decodes, running(folder, decodes) as strict:
        assert error_of(await strict.respond())["param"] == "input"
    folder = write_model(tmp_path / "bare", tokenizer, template=None)
    async with pods() as decodes, running(folder, decodes) as bare:
        assert error_of(await bare.respond())["param"] == "input"


async def test_failure_in_a_stream(stack: Stack) -> None:
    stack.pod.script = failing(pb.Failure.CODE_INTERNAL, "cuda: secret detail", after=stack.ids("hello"))
    events = await streamed(stack)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["content"][0]["text"] == "hello"
    assert failed["output"][0]["status"] == "incomplete"
    assert "secret" not in json.dumps(events)
    stack.pod.script = failing(pb.Failure.CODE_INTERNAL)
    assert (await stack.respond(stream=True)).status_code == 500


async def test_failure_after_nothing_but_keepalives(stack: Stack) -> None:
    async def silent(job: Job) -> None:
        await asyncio.sleep(0.5)
        await job.fail(pb.Failure.CODE_INTERNAL)

    stack.pod.script = silent
    response = await stack.respond(stream=True)
    assert ": ping\n\n" in response.text
    types = [event["type"] for event in response_events(response)]
    assert (types[0], types[-1]) == ("response.created", "response.failed")


async def test_leaving_ends_the_generation(stack: Stack) -> None:
    stack.pod.script = hang(*stack.ids("hello"))
    stream = await stack.client().responses.create(model="tiny", input="hi", stream=True)
    await anext(aiter(stream))
    await stream.close()
    async with asyncio.timeout(5):
        await stack.pod.jobs[0].cancelled.wait()


async def test_an_overlong_input_may_be_truncated(stack: Stack) -> None:
    long = "fox " * 2000
    assert error_of(await stack.respond(long))["code"] == "context_length_exceeded"
    body = (await stack.respond(long, truncation="auto", max_output_tokens=12)).json()
    assert len(stack.pod.jobs[0].prompt) == 500
    assert (body["truncation"], body["usage"]["input_tokens"]) == ("auto", 500)


async def test_headers_and_errors(stack: Stack) -> None:
    response = await stack.respond(stream=True)
    assert response.headers["x-request-id"]
    assert int(response.headers["openai-processing-ms"]) >= 0
    with pytest.raises(openai.NotFoundError) as raised:
        await stack.client().responses.create(model="other", input="hi")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
    assert raised.value.request_id
