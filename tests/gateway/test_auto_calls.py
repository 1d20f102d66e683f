"""Answers in which the model may call functions, as clients get them."""

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response as OfficialResponse
from tokenizers import AddedToken, Tokenizer

from .fake_worker import LENGTH, say
from .harness import Stack, events, pods, running
from .tiny_models import byte_fallback_tokenizer, byte_level_tokenizer, write_model

TEMPLATE = "{{ messages[0].content }}{% for tool in tools or [] %}<tool_call>{% endfor %}"
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("weather", "get_time")]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": name} for name in ("weather", "get_time")]
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
MESSAGES: Any = [{"role": "user", "content": "hi"}]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "hermes", tokenizer, template=TEMPLATE)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
async def test_calls_in_a_whole_answer(folder: Path, choice: dict[str, Any]) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        stack.pod.script = say(stack.ids(f"I look.\n{WEATHER}\n{TIME}"))
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, **choice}
        [answer] = (await stack.client().chat.completions.create(**asked)).choices
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "I look.\n"
        assert calls_of(answer.message) == [("weather", ARGUMENTS), ("get_time", "{}")]
        stack.pod.script = say(stack.ids(WEATHER + TIME))
        [answer] = (await stack.client().chat.completions.create(**asked, parallel_tool_calls=False)).choices
        assert answer.message.content is None
        assert calls_of(answer.message) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_the_official_client_reads_the_stream(folder: Path, step: int) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        stack.pod.script = say(stack.ids(f"I look. {WEATHER}{TIME}"), step=step)
        async with stack.client().chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
            done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
            [answer] = (await stream.get_final_completion()).choices
        assert [(event.name, event.arguments) for event in done] == [("weather", ARGUMENTS), ("get_time", "{}")]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "I look. "
        assert calls_of(answer.message) == [("weather", ARGUMENTS), ("get_time", "{}")]


async def test_each_choice_of_a_stream_has_its_own_calls(folder: Path) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        ids = stack.ids(WEATHER)
        stack.pod.script = say(ids, step=2)
        fields = {"n": 2, "stream": True, "logprobs": True, "return_token_ids": True}
        chunks = events(await stack.chat(tools=TOOLS, **fields))
        for index in (0, 1):
            first, *own, last = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert first["delta"] == {"role": "assistant", "content": ""}
            deltas = [delta for c in own for delta in c["delta"].get("tool_calls", [])]
            assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
            assert "".join(delta["function"]["arguments"] for delta in deltas) == ARGUMENTS
            assert [token for c in own for token in c.get("token_ids", [])] == ids
            assert sum(len(c["logprobs"]["content"]) for c in own if c["logprobs"]) == len(ids)
            assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("Just <tool_cal", None, "stop"),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', None, "stop"),
        ('<tool_call>\n{"name": "weather", "argu', LENGTH, "length"),
    ],
)
async def test_what_is_no_call_is_content(folder: Path, stream: bool, text: str, finish: Any, reason: str) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        stack.pod.script = say(stack.ids(text), step=2, **({} if finish is None else {"finish": finish}))
        answer = await stack.chat(tools=TOOLS, stream=stream)
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(answer)]
            content, last = "".join(c["delta"].get("content", "") for c in chunks), chunks[-1]
            assert not any("tool_calls" in chunk["delta"] for chunk in chunks)
        else:
            [last] = answer.json()["choices"]
            content = last["message"]["content"]
            assert "tool_calls" not in last["message"]
        assert (content, last["finish_reason"]) == (text, reason)


async def test_calls_are_read_only_where_the_request_allows_them(folder: Path) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        stack.pod.script = say(stack.ids(WEATHER))
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            [choice] = (await stack.chat(**fields)).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (WEATHER, "stop")
    async with pods() as decodes, running(folder, decodes, tool_call_parser="none") as stack:
        stack.pod.script = say(stack.ids(WEATHER))
        [choice] = (await stack.chat(tools=TOOLS)).json()["choices"]
        assert choice["message"]["content"] == WEATHER


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
async def test_a_marker_that_is_a_special_token_is_seen(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|end|>", "[TOOL_CALLS]")])
    folder = write_model(tmp_path / "mistral", tokenizer, template="{{ messages[0].content }}")
    async with pods() as decodes, running(folder, decodes, tool_call_parser="mistral") as stack:
        marker = tokenizer.token_to_id("[TOOL_CALLS]")
        stack.pod.script = say([marker, *stack.ids('[{"name": "weather", "arguments": {}}]')])
        [choice] = (await stack.chat(tools=TOOLS)).json()["choices"]
        spelled = "".join(call["function"]["name"] for call in choice["message"].get("tool_calls", []))
        assert (spelled, choice["finish_reason"]) == ("weather", "tool_calls")
        [plain] = (await stack.chat()).json()["choices"]
        assert "[TOOL_CALLS]" not in plain["message"]["content"]


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_responses(folder: Path, step: int) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        stack.pod.script = say(stack.ids(f"I look.{WEATHER}{TIME} Done."), step=step)
        body = (await stack.respond(tools=FLAT_TOOLS)).json()
        assert OfficialResponse.model_validate(body).output_text == "I look. Done."
        kinds = ["message", "function_call", "function_call", "message"]
        assert [item["type"] for item in body["output"]] == kinds
        assert [item.get("arguments") for item in body["output"]] == [None, ARGUMENTS, "{}", None]
        assert len({item["id"] for item in body["output"]}) == 4
        async with stack.client().responses.stream(model="tiny", input="hi", tools=FLAT_TOOLS) as stream:
            seen = [event async for event in stream]
            answer = await stream.get_final_response()
        assert [item.type for item in answer.output] == kinds
        assert answer.output_text == "I look. Done."
        added = [event for event in seen if event.type == "response.output_item.added"]
        done = [event for event in seen if event.type == "response.output_item.done"]
        assert [event.output_index for event in added] == [event.output_index for event in done] == [0, 1, 2, 3]
        assert {event.item.status for event in added} == {"in_progress"}
        assert {event.item.status for event in done} == {"completed"}
        written = [item.arguments for item in answer.output if item.type == "function_call"]
        assert written == [ARGUMENTS, "{}"]


async def test_logprobs_of_a_response_are_those_of_its_messages(folder: Path) -> None:
    async with pods() as decodes, running(folder, decodes) as stack:
        text = stack.ids("I look.")
        fields: dict[str, Any] = {"tools": FLAT_TOOLS, "include": ["message.output_text.logprobs"]}
        for step in (1, 1000):
            stack.pod.script = say(text, step=step)
            [message] = (await stack.respond(**fields)).json()["output"]
            assert len(message["content"][0]["logprobs"]) == len(text)
        stack.pod.script = say([*text, *stack.ids(WEATHER)])
        message, call = (await stack.respond(**fields)).json()["output"]
        assert (message["content"][0]["text"], call["arguments"]) == ("I look.", ARGUMENTS)


async def test_models_of_a_file_have_parsers_of_their_own(folder: Path, tmp_path: Path) -> None:
    async with pods(2) as decodes:
        lines = [
            f"- {{name: {name}, folder: {folder}, tool_call_parser: {parser}, pools: [{{decode: ['{pod.address}']}}]}}"
            for name, parser, pod in zip(("tiny", "plain"), ("auto", "none"), decodes, strict=True)
        ]
        (tmp_path / "models.yaml").write_text("models:\n" + "\n".join(lines))
        async with running(None, decodes, models_file=tmp_path / "models.yaml") as stack:
            for pod in decodes:
                pod.script = say(stack.ids(WEATHER))
            reasons = [
                (await stack.chat(tools=TOOLS, model=name)).json()["choices"][0]["finish_reason"]
                for name in ("tiny", "plain")
            ]
    assert reasons == ["tool_calls", "stop"]


async def test_the_shared_model_has_no_parser(stack: Stack) -> None:
    assert stack.model.tool_parser is None
