"""Functions that the model may or must call: the request to the pod, and how its text becomes calls."""

import json
from typing import Any

import pytest

from baton_gateway.reading.parts import AnswerReader, WholeAnswer, put_together
from baton_gateway.tools.tool_calls import ToolCalls
from baton_proto import serving_pb2 as pb

from .fake_worker import LENGTH, say
from .harness import Stack, events, pods, running
from .tiny_models import write_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Köln \\"}] , {\\\\", "more": [{"a": {}}]}'
CALLS = '[{"name": "weather", "arguments": ' + ARGUMENTS + '}, {"name": "get_time", "arguments": {}}]'


def merged(deltas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (name, arguments) of each call of a stream; each begins with all but its arguments."""
    calls: list[list[str]] = []
    for delta in deltas:
        if delta["index"] == len(calls):
            assert set(delta) == {"index", "id", "type", "function"}
            assert delta["type"] == "function"
            assert delta["function"]["arguments"] == ""
            calls.append([delta["function"]["name"], ""])
        else:
            assert delta["index"] == len(calls) - 1
            assert set(delta) == {"index", "function"}
            assert set(delta["function"]) == {"arguments"}
            calls[-1][1] += delta["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 33, 1000])
def test_calls_are_read_from_any_pieces(size: int):
    reader = ToolCalls(None)
    deltas = [delta for at in range(0, len(CALLS), size) for delta in reader.push(CALLS[at : at + size])]
    assert merged(deltas) == [("weather", ARGUMENTS), ("get_time", "{}")]
    ids = [delta["id"] for delta in deltas if "id" in delta]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") for id in ids)


def read_whole(text: str, calls: ToolCalls) -> WholeAnswer:
    reader = AnswerReader(None, calls)
    return put_together([*reader.push(text), *reader.end()])


def test_what_was_cut_short_stays_so():
    calls = read_whole(CALLS[:60], ToolCalls(None)).calls
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": CALLS[34:60]}]
    assert read_whole(CALLS[:20], ToolCalls(None)) == WholeAnswer("", "", [])
    assert read_whole("", ToolCalls("weather")).calls[0]["function"] == {"name": "weather", "arguments": ""}


async def test_the_pod_is_told_of_required_calls(stack: Stack):
    await stack.chat(tools=TOOLS, tool_choice="required")
    await stack.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    await stack.chat(tools=TOOLS, tool_choice=NAMED, response_format={"type": "json_object"})
    await stack.chat(tools=TOOLS, tool_choice="auto")
    await stack.chat(tools=TOOLS, tool_choice="none")
    several, one, named, auto, none = (job.submit.sampling for job in stack.pod.jobs)
    functions = {"weather": CITY, "get_time": {"type": "object"}}
    for sampling, parallel in ((several, True), (one, False)):
        assert sampling.grammar.kind == pb.Grammar.KIND_TOOL_CALLS
        assert sampling.grammar.param == "tools"
        assert json.loads(sampling.grammar.text) == {"functions": functions, "parallel": parallel}
    assert named.grammar == pb.Grammar(kind=pb.Grammar.KIND_JSON_SCHEMA, text=json.dumps(CITY), param="tools")
    assert not auto.HasField("grammar")
    assert not none.HasField("grammar")


async def test_required_calls(stack: Stack):
    stack.pod.script = say(stack.ids(CALLS))
    answer = await stack.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="required"
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("weather", ARGUMENTS),
        ("get_time", "{}"),
    ]


async def test_a_named_call(stack: Stack):
    stack.pod.script = say(stack.ids(ARGUMENTS))
    choice = (await stack.chat(tools=TOOLS, tool_choice=NAMED)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    stack.pod.script = say(stack.ids(ARGUMENTS)[:5], finish=LENGTH)
    assert (await stack.chat(tools=TOOLS, tool_choice=NAMED)).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("choice", "text", "expected"),
    [("required", CALLS, [("weather", ARGUMENTS), ("get_time", "{}")]), (NAMED, ARGUMENTS, [("weather", ARGUMENTS)])],
    ids=["required", "named"],
)
@pytest.mark.parametrize("step", [1, 4, 1000])
async def test_streamed_calls(stack: Stack, choice: Any, text: str, expected: list[Any], step: int):
    ids = stack.ids(text)
    stack.pod.script = say(ids, step=step)
    fields = {"stream": True, "n": 2, "logprobs": True, "return_token_ids": True}
    chunks = events(await stack.chat(tools=TOOLS, tool_choice=choice, **fields))
    for index in (0, 1):
        first, *own, last = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(len(c["delta"].get("tool_calls", [0])) == 1 for c in own)
        assert merged([delta for c in own for delta in c["delta"].get("tool_calls", [])]) == expected
        assert [token for c in own for token in c.get("token_ids", [])] == ids
        assert sum(len(c["logprobs"]["content"]) for c in own if c["logprobs"]) == len(ids)
        assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


async def test_the_official_client_reads_the_stream(stack: Stack):
    stack.pod.script = say(stack.ids(CALLS), step=5)
    async with stack.client().chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="required"
    ) as stream:
        answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", ARGUMENTS),
        ("get_time", "{}"),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.processes
async def test_the_template_sees_tools_and_calls(tmp_path: Any, tokenizer: Any):
    template = (
        "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    folder = write_model(tmp_path / "tools", tokenizer, template=template)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    async with pods() as decodes, running(folder, decodes) as stack:
        for choice in ("auto", "none"):
            assert (await stack.chat(messages=messages, tools=TOOLS, tool_choice=choice)).status_code == 200
        auto, none = (job.prompt for job in stack.pod.jobs)
        assert auto == stack.ids("weather get_time hiRomesunny")
        assert none == stack.ids("hiRomesunny")


@pytest.mark.processes
async def test_half_a_surrogate_pair_in_an_earlier_call(tmp_path: Any, tokenizer: Any) -> None:
    template = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    template += "{% endfor %}{{ m.content or '' }}{% endfor %}"
    folder = write_model(tmp_path / "tools", tokenizer, template=template)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": r'{"\ud800": "\ud83d\ude00"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    async with pods() as decodes, running(folder, decodes) as stack:
        response = await stack.chat(messages=messages, tools=TOOLS)
        assert response.status_code == 200, response.text
        assert stack.prompt() == 'hi{"\ufffd": "😀"}'
