"""Thoughts of models, from the fields of a request to what clients get."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import pytest_asyncio
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from tokenizers import AddedToken

from baton_proto import serving_pb2 as pb

from .fake_worker import LENGTH, say
from .harness import Stack, error_of, events, pods, response_events, running
from .tiny_models import byte_level_tokenizer, write_model

EVENTS = pydantic.TypeAdapter[Any](ResponseStreamEvent)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% for tool in tools or [] %}<tool_call>{% endfor %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif forced %}<think>\n{% endif %}"
)
TEXT = "<think>\nThe fox,\nhm.\n</think>\n\nIt is lazy."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return write_model(tmp_path_factory.mktemp("models") / "thinker", tokenizer, template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(folder: Path, processes: None) -> AsyncIterator[Stack]:
    async with pods(max_model_len=4096) as decodes, running(folder, decodes) as stack:
        yield stack


@pytest.fixture
def stack(thinker: Stack) -> Stack:
    thinker.pod.script = say(thinker.ids(TEXT))
    thinker.pod.jobs.clear()
    return thinker


def thinking_tokens(stack: Stack) -> int:
    """Return the number of tokens between the markers of TEXT."""
    ids = stack.ids(TEXT)
    begin, finish = (stack.model.tokenizer.token_id(token) for token in ("<think>", "</think>"))
    return ids.index(finish or 0) - ids.index(begin or 0) - 1


async def test_a_whole_answer(stack: Stack) -> None:
    completion = await stack.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}])
    [choice] = completion.choices
    assert choice.message.content == "It is lazy."
    assert choice.message.model_extra == {"reasoning_content": "The fox,\nhm.", "reasoning": "The fox,\nhm."}
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == thinking_tokens(stack)
    assert completion.usage.completion_tokens == len(stack.ids(TEXT))


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("more", [{}, {"stop": ["never seen"]}, {"logprobs": True}])
async def test_a_stream(stack: Stack, step: int, more: dict[str, Any]) -> None:
    stack.pod.script = say(stack.ids(TEXT), step=step)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "n": 2}
    *chunks, usage = events(await stack.chat(stream=True, **options, **more))
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "The fox,\nhm."
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "The fox,\nhm."
        assert "".join(delta.get("content", "") for delta in deltas) == "It is lazy."
        kinds = ["reasoning" in delta for delta in deltas[1:-1] if delta]
        assert kinds == sorted(kinds, reverse=True)
        assert sum(kinds) > 3 or step > 1
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * thinking_tokens(stack)}


async def test_thoughts_that_the_prompt_begins(stack: Stack) -> None:
    stack.pod.script = say(stack.ids("The fox.\n</think>\n\nLazy."))
    [choice] = (await stack.chat(chat_template_kwargs={"forced": True})).json()["choices"]
    assert stack.prompt().endswith("<think>\n")
    assert choice["message"]["reasoning"] == "The fox."
    assert choice["message"]["content"] == "Lazy."
    stack.pod.script = say(stack.ids("The fox"), finish=LENGTH)
    [choice] = (await stack.chat(chat_template_kwargs={"forced": True})).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("The fox", "")
    assert choice["finish_reason"] == "length"


async def test_a_model_that_is_told_not_to_think(stack: Stack) -> None:
    stack.pod.script = say(stack.ids("Lazy."))
    body = (await stack.chat(reasoning_effort="none")).json()
    assert stack.prompt().endswith("[none]<|assistant|><think>\n\n</think>\n\n")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Lazy.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    await stack.chat(reasoning_effort="high")
    assert stack.prompt(1).endswith("[high]<|assistant|>")
    await stack.chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "mild"})
    assert stack.prompt(2).endswith("[mild]<|assistant|>")
    assert error_of(await stack.chat(reasoning_effort="utmost"))["param"] == "reasoning_effort"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_thoughts_of_earlier_turns_reach_the_template(stack: Stack, field: str) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", field: "because"},
        {"role": "user", "content": "c"},
    ]
    assert (await stack.chat(messages=turns)).status_code == 200
    assert "<|assistant|><think>\nbecause\n</think>\n\nb<|end|>" in stack.prompt()
    tokens = (await stack.http.post("/tokenize", json={"model": "tiny", "messages": turns})).json()["tokens"]
    assert tokens == stack.pod.jobs[0].prompt


async def test_a_message_that_is_continued(stack: Stack) -> None:
    stack.pod.script = say(stack.ids(" more </think>\n\nLazy."))
    for content, thoughts in (("<think>\nSome", " more "), ("No <b>", None)):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        [choice] = (await stack.chat(messages=turns, **fields)).json()["choices"]
        assert choice["message"].get("reasoning") == thoughts


async def test_calls_come_after_thoughts(stack: Stack) -> None:
    stack.pod.script = say(stack.ids(f"<think>\nI must call <tool_call>.\n</think>\n\n{CALL}"), step=2)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    whole: Any = await stack.client().chat.completions.create(**asked)
    async with stack.client().chat.completions.stream(**asked) as stream:
        streamed: Any = await stream.get_final_completion()
    for completion in (whole, streamed):
        [choice] = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content in (None, "")
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Rome"}']


async def test_grammars_leave_thoughts_free(stack: Stack) -> None:
    lark = stack.model.tokenizer.lark
    begin, finish = lark.spell("<think>"), lark.spell("</think>")
    for inside in (False, True):
        await stack.chat(response_format=JSON_FORMAT, chat_template_kwargs={"forced": inside})
        grammar = stack.pod.jobs[-1].submit.sampling.grammar
        assert (grammar.kind, grammar.param) == (pb.Grammar.KIND_JSON_SCHEMA, "response_format.json_schema.schema")
        first, thoughts, *_ = grammar.around.split("\n")
        assert first.split() == ["start:", "thoughts", "@answer"]
        assert thoughts == ("thoughts: thought" if inside else f"thoughts: ({begin} thought)?")
        assert f"thought: any_thought {finish}" in grammar.around
    await stack.chat(response_format=JSON_FORMAT, reasoning_effort="none")
    assert stack.pod.jobs[-1].submit.sampling.grammar.around == ""
    await stack.chat(tools=TOOLS, tool_choice="required")
    grammar = stack.pod.jobs[-1].submit.sampling.grammar
    assert (grammar.kind, grammar.param) == (pb.Grammar.KIND_LARK, "tools")
    assert '"name\\": \\"weather\\"' in grammar.text
    assert "@answer" in grammar.around


async def test_a_budget_of_thoughts(stack: Stack) -> None:
    await stack.chat(thinking_token_budget=7)
    grammar = stack.pod.jobs[-1].submit.sampling.grammar
    assert (grammar.kind, grammar.param, grammar.around) == (pb.Grammar.KIND_LARK, "thinking_token_budget", "")
    assert "{0,7}" in grammar.text
    await stack.chat(thinking_token_budget=7, response_format=JSON_FORMAT)
    grammar = stack.pod.jobs[-1].submit.sampling.grammar
    assert grammar.kind == pb.Grammar.KIND_JSON_SCHEMA
    assert "{0,7}" in grammar.around
    await stack.chat()
    assert not stack.pod.jobs[-1].submit.sampling.HasField("grammar")
    assert error_of(await stack.chat(thinking_token_budget=-1))["param"] == "thinking_token_budget"


@pytest.mark.processes
async def test_a_budget_needs_a_model_that_thinks(folder: Path) -> None:
    async with pods() as decodes, running(folder, decodes, reasoning_parser="none") as stack:
        stack.pod.script = say(stack.ids(TEXT))
        error = error_of(await stack.chat(thinking_token_budget=5))
        assert (error["param"], error["type"]) == ("thinking_token_budget", "invalid_request_error")
        body = (await stack.chat()).json()
        assert body["choices"][0]["message"]["content"] == TEXT
        assert "completion_tokens_details" not in body["usage"]


async def test_a_response_has_an_item_for_thoughts(stack: Stack) -> None:
    stack.pod.script = say(stack.ids(f"{TEXT}{CALL}"))
    tools = [{"type": "function", "name": "weather"}]
    fields = {"tools": tools, "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}}
    body = (await stack.respond(**fields)).json()
    official = OfficialResponse.model_validate(body)
    assert [item.type for item in official.output] == ["reasoning", "message", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "The fox,\nhm."}]
    assert (body["output"][0]["summary"], body["output"][0]["status"]) == ([], "completed")
    assert body["reasoning"]["effort"] == "low"
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": thinking_tokens(stack)}
    logprobs = body["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).strip().startswith("It is lazy.")


@pytest.mark.parametrize("step", [1, 1000])
async def test_a_streamed_response(stack: Stack, step: int) -> None:
    stack.pod.script = say(stack.ids(TEXT), step=step)
    seen = response_events(await stack.respond(stream=True))
    for event in seen:
        EVENTS.validate_python(event, strict=False)
    kinds = [event["type"] for event in seen if event.get("output_index") == 0]
    assert kinds[:2] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[-3:] == ["response.reasoning_text.done", "response.content_part.done", "response.output_item.done"]
    assert set(kinds[2:-3]) == {"response.reasoning_text.delta"}
    deltas = [event["delta"] for event in seen if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "The fox,\nhm."
    final = seen[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert len({item["id"] for item in final["output"]}) == 2


async def test_the_items_of_a_response_are_the_input_of_the_next(stack: Stack) -> None:
    output = (await stack.respond()).json()["output"]
    (
        await stack.respond([{"role": "user", "content": "a"}, *output, {"role": "user", "content": "c"}])
    ).raise_for_status()
    assert "<|assistant|><think>\nThe fox,\nhm.\n</think>\n\nIt is lazy.<|end|>" in stack.prompt(1)
    bad = [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}, {"role": "user", "content": "c"}]
    assert error_of(await stack.respond(bad))["param"] == "input[0].content[0].text"
