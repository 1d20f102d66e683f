"""No message vanishes: its role is written by the template, said in another way, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton_demo.chat import TEMPLATE as DEMO
from baton_gateway.errors import ApiError
from baton_gateway.models.chat_template import ChatTemplate
from baton_gateway.models.conversation import Conversation
from baton_gateway.models.template_roles import TemplateRoles

from .chat_models import CHATML, LLAMA3, MISTRAL, SILENT, THINKING, served, tokenizer_of
from .harness import pods, running
from .tiny_models import write_model

GPT_OSS = """{%- if messages[0].role in ['developer', 'system'] %}
    {{- '<|start|>developer' + messages[0].content + '<|end|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages if message.role in ['user', 'assistant'] %}
    {{- '<|start|>' + message.role + message.content + '<|end|>' }}
{%- endfor %}"""
TOOLS_GIVEN = """{%- for message in messages %}
    {%- if message.role != 'tool' or tools %}{{- '<|' + message.role + '|>' + message.content | upper }}{%- endif %}
{%- endfor %}"""


def m(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"the {role}'s" if content is None else content, **more}


def written(template: str, messages: list[dict[str, Any]], param: str = "messages", **more: Any) -> str:
    """Return the prompt of a conversation."""
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    asked = Conversation(messages, True, False, {}, more.get("tools"), False, param)
    return str(ours.render_conversation(TemplateRoles(ours).fit(asked)))


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (LLAMA3, "<|developer|>\n\n"),
        (CHATML, "<|im_start|>developer\n"),
        (DEMO, "<|system|>"),
        (MISTRAL, "[INST] "),
        (SILENT, "<|system|>"),
        (GPT_OSS, "<|start|>developer"),
    ],
)
def test_a_developer_is_heard(template: str, before: str) -> None:
    assert f"{before}be kind" in written(template, [m("developer", "be kind"), m("user", "x")])


@pytest.mark.parametrize("template", [LLAMA3, CHATML, THINKING, DEMO, MISTRAL, SILENT, GPT_OSS])
@pytest.mark.parametrize("roles", [("system", "developer"), ("developer", "system"), ("system", "system", "developer")])
def test_several_instructions_are_all_written(template: str, roles: tuple[str, ...]) -> None:
    messages = [*(m(role, f"rule {n}") for n, role in enumerate(roles)), m("user", "x")]
    prompt = written(template, messages)
    at = [prompt.index(f"rule {n}") for n in range(len(roles))]
    assert at == sorted(at)
    if template in (MISTRAL, SILENT, GPT_OSS):
        assert "\n\n".join(f"rule {n}" for n in range(len(roles))) in prompt
    else:
        assert "\n\nrule 1" not in prompt or template == LLAMA3


@pytest.mark.parametrize("template", [LLAMA3, CHATML, THINKING, DEMO, MISTRAL, SILENT])
def test_what_a_template_knows_is_not_changed(template: str) -> None:
    messages = [m("system"), m("user"), m("assistant"), m("user", "more")]
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    asked = Conversation(messages, True, False, {}, None, False, "messages")
    assert TemplateRoles(ours).fit(asked) == asked


@pytest.mark.parametrize(
    ("template", "messages", "index"),
    [
        (SILENT, [m("user"), m("tool", tool_call_id="1")], 1),
        (SILENT, [m("user"), m("function", name="f"), m("user")], 1),
        (SILENT, [m("user"), m("system")], 1),
        (SILENT, [m("system"), m("developer"), m("system"), m("user"), m("developer")], 4),
        (GPT_OSS, [m("developer"), m("user"), m("developer")], 2),
        (TOOLS_GIVEN, [m("user"), m("assistant", ""), m("tool", tool_call_id="1")], 2),
        ("{{ messages[-1].content if messages[-1].role == 'user' }}", [m("assistant"), m("user")], 0),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", [m("system"), m("user")], 0),
    ],
)
def test_a_message_that_would_vanish_is_refused(template: str, messages: list[dict[str, Any]], index: int) -> None:
    with pytest.raises(ApiError, match="leaves out this message") as refusal:
        written(template, messages)
    assert (refusal.value.status, refusal.value.param) == (400, f"messages[{index}].role")
    with pytest.raises(ApiError) as refusal:
        written(template, messages, param="input")
    assert refusal.value.param == "input"


def test_what_is_written_only_under_a_condition_is_taken_where_it_holds() -> None:
    messages = [m("user"), m("assistant", ""), m("tool", "found", tool_call_id="1")]
    tool = {"type": "function", "function": {"name": "f"}}
    assert written(TOOLS_GIVEN, messages, tools=[tool]).endswith("<|tool|>FOUND")


def test_a_message_without_content_may_be_left_out() -> None:
    assert written(SILENT, [m("user"), m("function", "", name="f"), m("tool", " \n", tool_call_id="1")])


@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_template_that_raises_says_why(role: str) -> None:
    with pytest.raises(ApiError, match="refused the messages: Conversation roles must alternate") as refusal:
        written(MISTRAL, [m("user"), m("user"), m(role)])
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_many_messages_of_an_unknown_role_cost_one_more_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ChatTemplate("{% for m in messages %}{{ m.content if m.role != 'tool' or tools }}{% endfor %}", {})
    roles, calls = TemplateRoles(ours), []
    plain = ChatTemplate.render_conversation
    monkeypatch.setattr(ChatTemplate, "render_conversation", lambda *args: calls.append(1) or plain(*args))
    tool = {"type": "function", "function": {"name": "f"}}
    roles.fit(Conversation([m("user"), *[m("tool", "x")] * 500], True, False, {}, [tool], False, "messages"))
    assert len(calls) == 1


@pytest.mark.processes
async def test_over_http(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tokenizer_of("byte level"), template=SILENT)
    async with pods() as decodes, running(folder, decodes) as stack:
        said = [m("developer", "be kind"), m("user", "x")]
        (await stack.chat(messages=said)).raise_for_status()
        (await stack.respond([m("developer", "be kind"), m("user", "x")])).raise_for_status()
        (await stack.respond([m("developer", "kind"), m("user", "x")], instructions="be")).raise_for_status()
        assert stack.prompt(0) == stack.prompt(1) == "<|system|>be kind<|end|><|user|>x<|end|><|assistant|>"
        assert stack.prompt(2).startswith("<|system|>be\n\nkind<|end|>")
        refused = await stack.chat(messages=[m("user"), m("tool", tool_call_id="1")])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1].role")
        refused = await stack.chat(messages=[m("user"), m("narrator")])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1].role")
        tokenized = await stack.http.post("/tokenize", json={"messages": [m("user"), m("tool", tool_call_id="1")]})
        assert (tokenized.status_code, json.loads(tokenized.text)["error"]["param"]) == (400, "messages[1].role")


def test_the_guard_costs_known_roles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(tmp_path / "m", CHATML)
    calls: list[int] = []
    plain = ChatTemplate.render_conversation
    monkeypatch.setattr(ChatTemplate, "render_conversation", lambda *args: calls.append(1) or plain(*args))
    messages = [m("system"), m("user"), m("assistant"), m("tool", tool_call_id="1"), m("function", name="f")]
    assert model.chat_tokens(Conversation(messages, True, False, {}, None, False, "messages"))
    assert len(calls) == 1
