"""llama-index's OpenAILike: its answers are those of the official client."""

import asyncio
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from .conftest import KEY, Baton

QUESTION = "What is Baton?"
TURNS = [ChatMessage(role="user", content=QUESTION)]
PROMPT = "Baton is"


def model(baton: Baton, **options: Any) -> OpenAILike:
    given = {"model": baton.model, "api_base": baton.url, "api_key": KEY, "temperature": 0, "max_retries": 0}
    return OpenAILike(**{**given, "context_window": 8192, **options})


@pytest.fixture(scope="module")
def expected_chat(baton: Baton) -> str:
    messages: Any = [{"role": "user", "content": QUESTION}]
    answer = baton.openai.chat.completions.create(model=baton.model, messages=messages, temperature=0)
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def expected_text(baton: Baton) -> str:
    answer = baton.openai.completions.create(model=baton.model, prompt=PROMPT, temperature=0, max_tokens=24)
    return answer.choices[0].text


def test_chat(baton: Baton, expected_chat: str) -> None:
    llm = model(baton, is_chat_model=True)
    answers = [llm.chat(TURNS), asyncio.run(llm.achat(TURNS))]
    assert [answer.message.content for answer in answers] == [expected_chat] * 2
    # A chat model completes a prompt by answering it.
    assert llm.complete(QUESTION).text == expected_chat


def test_a_streamed_chat(baton: Baton, expected_chat: str) -> None:
    llm = model(baton, is_chat_model=True)

    async def read() -> list[Any]:
        return [part async for part in await llm.astream_chat(TURNS)]

    for parts in (list(llm.stream_chat(TURNS)), asyncio.run(read())):
        assert len(parts) > 1
        assert "".join(part.delta or "" for part in parts) == expected_chat == parts[-1].message.content


def test_completions(baton: Baton, expected_text: str) -> None:
    llm = model(baton, is_chat_model=False, max_tokens=24)
    answers = [llm.complete(PROMPT), asyncio.run(llm.acomplete(PROMPT))]
    assert [answer.text for answer in answers] == [expected_text] * 2
    parts = list(llm.stream_complete(PROMPT))
    assert len(parts) > 1
    assert "".join(part.delta or "" for part in parts) == expected_text == parts[-1].text
