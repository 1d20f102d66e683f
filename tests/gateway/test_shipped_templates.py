"""Chat templates in all the ways in which models are shipped, and templates that take too long."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from baton_gateway.concurrency.inline import TooLongInlineError, inline_limit
from baton_gateway.concurrency.turns import Client, Turns
from baton_gateway.errors import ApiError
from baton_gateway.models.chat_template import ChatTemplate
from baton_gateway.models.model import ModelError, load_model
from baton_gateway.models.models_file import ModelSpec, PoolSpec
from baton_gateway.models.template_files import find_chat_templates
from baton_gateway.reasoning.harmony import HarmonyThoughts
from baton_gateway.reasoning.mistral import MistralThoughts
from baton_gateway.tools.tool_calls import with_parsed_arguments

from .harness import Stack, error_of, pods, running
from .loop_watch import not_held
from .tiny_models import write_model

SHOWN = "{% for m in messages %}{{ m.content }}{% endfor %}"
DEFAULT, TOOL_USE, RAG = f"default {SHOWN}", f"tool {SHOWN}", f"rag {SHOWN}{{{{ documents[0].text }}}}"
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
DOCUMENTS = [{"title": "t", "text": "The fox."}]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[Any] | None = None, **fields: Any) -> str:
    options: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}}
    return ChatTemplate(source, {}).render(messages or MESSAGES, **{**options, **fields})


def test_files_come_before_the_configuration(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
            {"name": "rag", "template": "c"},
        ]
    }
    assert find_chat_templates(tmp_path, config) == {"default": "a", "tool_use": "b", "rag": "c"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "d"}))
    assert find_chat_templates(tmp_path, config) == {"default": "d", "tool_use": "b", "rag": "c"}
    (tmp_path / "chat_template.jinja").write_text("e")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("f")
    assert find_chat_templates(tmp_path, config) == {"default": "e", "tool_use": "f", "rag": "c"}


def test_files_are_those_that_transformers_writes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    reference.chat_template = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": RAG}
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert find_chat_templates(tmp_path, config) == reference.chat_template


@pytest.mark.parametrize(
    "template", [5, [5], [{"name": "default"}], [{"template": "a"}], [{"name": 1, "template": "a"}], {"default": 5}]
)
def test_templates_that_are_no_text(tmp_path: Path, tokenizer: Tokenizer, template: Any) -> None:
    folder = write_model(tmp_path / "m", tokenizer, template=None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: .*chat_template"):
        load_model(ModelSpec(folder=folder, pools=(PoolSpec(decode=("127.0.0.1:1",)),)))


@pytest.mark.processes
async def test_each_request_gets_the_template_that_fits_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_model(tmp_path / "m", tokenizer, template=DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    for name, source in (("tool_use", TOOL_USE), ("rag", RAG)):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    async with pods() as decodes, running(folder, decodes) as stack:
        for fields in ({}, {"tools": TOOLS}, {"documents": DOCUMENTS}, {"tools": TOOLS, "tool_choice": "none"}):
            assert (await stack.chat("hi", **fields)).status_code == 200
        assert [stack.prompt(n) for n in range(4)] == ["default hi", "tool hi", "rag hiThe fox.", "default hi"]
        fields = {"model": "tiny", "messages": MESSAGES, "documents": DOCUMENTS}
        tokens = (await stack.http.post("/tokenize", json=fields)).json()["tokens"]
        assert tokens == stack.pod.jobs[2].prompt
        assert error_of(await stack.chat(documents=[1]))["param"] == "documents[0]"
        assert error_of(await stack.chat(documents=[{}] * 300))["param"] == "documents"


def test_documents_reach_the_template_as_transformers_gives_them(tokenizer: Tokenizer) -> None:
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ tools }}"
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for documents in (DOCUMENTS, None):
        expected = reference.apply_chat_template(
            MESSAGES, chat_template=source, documents=documents, tokenize=False, add_generation_prompt=True
        )
        assert render(source, documents=documents) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = namespace() %}{% for a in range(99999) %}{% for b in range(99999) %}{% set x.y = b %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{% if n and caller %}{{ caller() }}{% endif %}{% if n %}{% call m(n - 1) %}{% endcall %}"
        "{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set s = messages[0].content %}{% for a in range(99999) %}{% for b in s * 9999 %}{% endfor %}{% endfor %}",
    ],
)
def test_rendering_ends_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_gateway.models.chat_template.MAX_RENDER_S", 0.1)
    began = time.monotonic()
    with pytest.raises(ApiError, match="more than 0 seconds") as caught:
        render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ lipsum(n=1000) }}",
    ],
)
def test_one_operation_cannot_take_all_memory(source: str) -> None:
    with pytest.raises(ApiError, match="refused the messages"):
        render(source)
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 'x' | center(3) }}{{ 2 * 3 }}{{ 1.5 * 2 }}") == "---1024 x 63.0"


def test_work_in_the_event_loop_gets_less_time() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with inline_limit(), pytest.raises(TooLongInlineError):
        render(source)
    assert time.monotonic() - began < 3


async def test_small_work_that_takes_long_is_repeated_in_a_thread() -> None:
    threads: list[int] = []

    def work() -> str:
        threads.append(threading.get_ident())
        return render("{% for a in range(99) %}{% for b in range(9999) %}{% endfor %}{% endfor %}done")

    turns = Turns(threads=1)
    try:
        assert await turns.run(work, 1, Client()) == "done"
    finally:
        turns.close()
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


@pytest.mark.processes
async def test_a_slow_template_does_not_hold_the_loop(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'slow' %}}{slow}{{% endif %}}{SHOWN}"
    folder = write_model(tmp_path / "m", tokenizer, template=source)
    monkeypatch.setattr("baton_gateway.models.chat_template.MAX_RENDER_S", 0.5)
    async with pods() as decodes, running(folder, decodes) as stack:

        async def ask(stack: Stack = stack) -> None:
            error = error_of(await stack.chat("slow"))
            assert (error["param"], error["type"]) == ("messages", "invalid_request_error")

        await not_held(ask)
        assert (await stack.chat("hi")).status_code == 200


CALLS = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]


@pytest.mark.parametrize(
    "written",
    [
        "{{ call.function.arguments | tojson }}",
        "{{ '' + call.function.arguments }}",
        "{{ call.function.arguments + '' }}",
        "{% if call.function.arguments is string %}?{% else %}{{ call.function.arguments | tojson }}{% endif %}",
        '{"city": "{{ call.function.arguments.city }}"}',
    ],
)
def test_arguments_of_calls_suit_every_template(written: str) -> None:
    message = with_parsed_arguments({"role": "assistant", "tool_calls": CALLS})
    source = f"{{% for call in messages[0].tool_calls %}}{written}{{% endfor %}}"
    assert render(source, [message]) == '{"city": "Köln"}'


def test_thoughts_stand_where_templates_of_gpt_oss_expect_them() -> None:
    called = {"role": "assistant", "content": "I look.", "tool_calls": CALLS}
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
    )
    turns = [HarmonyThoughts.restored(dict(message), "Hm.") for message in (called, called | {"content": None})]
    turns.append(HarmonyThoughts.restored({"role": "assistant", "content": "Done."}, "Hm."))
    assert render(source, turns) == "[Hm.\n\nI look.|][Hm.|][Hm.|Done.]"


def test_thoughts_stand_where_templates_of_mistral_expect_them() -> None:
    source = (
        "{% for b in messages[0].content %}{% if b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]"
        "{% else %}{{ b.text }}{% endif %}{% endfor %}"
    )
    restored = MistralThoughts.restored({"role": "assistant", "content": "Done."}, "Hm.")
    assert render(source, [restored]) == "[THINK]Hm.[/THINK]Done."
