"""Agents of OpenAI and of LangChain call functions of a scripted model, in each format."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    FunctionTool,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolCallItem,
)
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tokenizers import AddedToken

from baton_gateway.reasoning.formats import FORMATS, ReasoningFormat
from baton_gateway.tools.tool_formats import PARSERS, ToolFormat

from .fake_worker import Job, say
from .harness import Stack, pods, running
from .model_outputs import FUNCTIONS, OUTPUTS, Output
from .tiny_models import byte_level_tokenizer, write_model

pytestmark = pytest.mark.processes
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}{% endif %}<|assistant|>"
)
RESULTS = {"get_weather": "sunny", "get_time": "noon", "write_file": "written"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
    for name, schema in FUNCTIONS.items()
]
QUESTION = "What is the weather in Köln?"
# The recorded output with the most calls of each format.
CALLING: dict[ToolFormat, Output] = {
    tools: max((o for o in OUTPUTS.values() if o.tools == tools and o.place == "before"), key=lambda o: len(o.calls))
    for tools in PARSERS
    if tools != "deepseek"
} | {"deepseek": OUTPUTS["deepseek-v3.1"], "minimax": OUTPUTS["minimax-m2"], "step3": OUTPUTS["step-3"]}
FINAL: dict[ReasoningFormat, str] = {
    "think": "<think>\nDone.\n</think>\n\nIt is sunny.",
    "mistral": "[THINK]Done.[/THINK]It is sunny.",
    "gemma": "<|channel>thought\nDone.<channel|>It is sunny.",
    "harmony": "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>It is sunny.",
    "granite": "Here is my thought process: Done. Here is my response: It is sunny.",
    "think_response": "<think>\nDone.\n</think>\n\n<response>\nIt is sunny.\n</response>",
    "hunyuan": "<think>\nDone.\n</think>\n<answer>\nIt is sunny.\n</answer>",
    "seed_oss": "<seed:think>Done.</seed:think>It is sunny.",
    "longcat": "<longcat_think>\nDone.\n</longcat_think>\nIt is sunny.",
    "none": "It is sunny.",
}


def folder_of(folder: Path) -> Path:
    """Write a model whose tokenizer has the markers of all formats, most of them as control tokens."""
    tokenizer = byte_level_tokenizer()
    markers = {marker for kind in (*FORMATS.values(), *PARSERS.values()) for marker in kind.markers}
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in PLAIN])
    special = sorted(markers - set(PLAIN))
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in special])
    return write_model(folder, tokenizer, template=TEMPLATE)


def script(stack: Stack, output: Output) -> None:
    """Make the model call functions where no results are known yet, and answer where they are."""

    async def answer(job: Job) -> None:
        asked = "sunny" in stack.model.tokenizer.decode(job.prompt, skip_special_tokens=False)
        text = FINAL[output.reasoning] if asked else output.text
        if asked and output.place == "inside":
            text = text.removeprefix("<think>\n")
        await say(stack.ids(text), step=3)(job)

    stack.pod.script = answer


async def openai_agent(stack: Stack, stream: bool) -> tuple[list[tuple[str, Any]], Any]:
    """Return the calls that the agent has made, and its answer."""
    client, messages = stack.client(), [{"role": "user", "content": QUESTION}]
    made: list[tuple[str, Any]] = []
    for _ in range(3):
        asked: Any = {"model": "tiny", "messages": messages, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked) as streamed:
                completion: Any = await streamed.get_final_completion()
        else:
            completion = await client.chat.completions.create(**asked)
        [choice] = completion.choices
        if choice.finish_reason != "tool_calls":
            return made, choice.message.content
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            made.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]})
    raise AssertionError("the loop does not end")


async def agents_sdk(stack: Stack, stream: bool, kind: type[Model]) -> tuple[list[tuple[str, Any]], Any]:
    """Do the same with OpenAI's Agents SDK. kind: of its two models, one for each of OpenAI's two interfaces."""
    ran: list[tuple[str, Any]] = []

    def tool(name: str, schema: Any) -> FunctionTool:
        async def call(_: Any, arguments: str) -> str:
            ran.append((name, json.loads(arguments)))
            return RESULTS[name]

        empty = {"type": "object", "properties": {}}
        return FunctionTool(name, "", schema or empty, call, strict_json_schema=False)

    model: Any = kind("tiny", openai_client=stack.client())  # type: ignore[call-arg]
    tools: list[Any] = [tool(name, schema) for name, schema in FUNCTIONS.items()]
    agent: Agent[Any] = Agent("weather", model=model, tools=tools)
    config = RunConfig(tracing_disabled=True)
    if stream:
        result: Any = Runner.run_streamed(agent, QUESTION, run_config=config, max_turns=3)
        events = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in events
    else:
        result = await Runner.run(agent, QUESTION, run_config=config, max_turns=3)
    asked = [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
    return same(ran, [(call.name, json.loads(call.arguments)) for call in asked]), result.final_output


async def langchain_agent(stack: Stack, stream: bool) -> tuple[list[tuple[str, Any]], Any]:
    ran: list[tuple[str, Any]] = []

    def tool(name: str, schema: Any) -> StructuredTool:
        async def call(**arguments: Any) -> str:
            ran.append((name, arguments))
            return RESULTS[name]

        empty = {"type": "object", "properties": {}}
        return StructuredTool(name=name, description=name, args_schema=schema or empty, coroutine=call)

    url, key = f"{stack.url}/v1", SecretStr("none")
    chat = ChatOpenAI(model="tiny", base_url=url, api_key=key, max_retries=0, streaming=stream)
    agent: Any = create_agent(chat, [tool(name, schema) for name, schema in FUNCTIONS.items()])
    question = {"messages": [HumanMessage(QUESTION)]}
    state, chunks = {}, 0
    async for mode, part in agent.astream(question, stream_mode=["messages", "values"]):
        if mode == "values":
            state = part
        else:
            chunks += isinstance(part[0], AIMessageChunk)
    answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
    assert (chunks > len(answers)) is stream
    assert not any(answer.invalid_tool_calls for answer in answers)
    asked = [(call["name"], call["args"]) for answer in answers for call in answer.tool_calls]
    return same(ran, asked), answers[-1].content


def same(ran: list[tuple[str, Any]], asked: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the calls in the order of the answer. The agent has run all of them, in any order, as it runs several at
    once."""
    assert sorted(ran, key=str) == sorted(asked, key=str)
    return asked


@pytest.mark.parametrize("tools", PARSERS)
async def test_agents(tmp_path: Path, tools: ToolFormat) -> None:
    output = CALLING[tools]
    settings: dict[str, Any] = {"tool_call_parser": tools, "reasoning_parser": output.reasoning}
    folder = folder_of(tmp_path / "model")
    if output.place == "inside":
        (folder / "chat_template.jinja").write_text(TEMPLATE + "<think>")
    async with pods(vocab_size=900, max_model_len=4096) as decodes, running(folder, decodes, **settings) as stack:
        script(stack, output)
        over_chat = partial(agents_sdk, kind=OpenAIChatCompletionsModel)
        over_responses = partial(agents_sdk, kind=OpenAIResponsesModel)
        for agent in (openai_agent, over_chat, over_responses, langchain_agent):
            for stream in (False, True):
                made, answer = await agent(stack, stream)
                assert made == output.calls
                assert answer == "It is sunny."
        if tools == "kimi":
            assert "functions.get_weather:0 get_weather" in stack.prompt(1)
