"""Chat templates render as transformers renders them."""

import sys

import pytest
from transformers import PreTrainedTokenizerFast

from baton_gateway.errors import ApiError
from baton_gateway.models.chat_template import ChatTemplate
from baton_gateway.models.template_files import find_chat_templates
from baton_tokenizer.load import read_tokenizer

from .tiny_models import CHAT_TEMPLATE, write_model

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|system|>" + system + "\\n" }}
{%- for message in messages %}
    {%- if loop.index0 > 20 %}
        {%- break %}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n' }}
    {%- endif %}
{%- endif %}
"""
BLOCKS = """{% for message in messages %}
    {% if message.role == 'user' %}
  U: {{ message.content }}
    {% else %}
  {% generation %}A: {{ message.content }}{% endgeneration %}

    {% endif %}
{% endfor %}
{{ {"a": "<b> & 'é'", "n": [1, 2]} | tojson }} {{ {"z": 1} | tojson(indent=2) }}
{% set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }} {{ strftime_now("%Y") }}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "a < b & 'c'\n"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y "}, {"role": "user", "content": "日本"}],
    [{"role": "user", "content": "x", "name": None}, {"role": "assistant", "content": "partly done  "}],
]


@pytest.fixture(scope="module")
def reference(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_LIKE, BLOCKS], ids=["plain", "llama", "blocks"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("ending", ["generation", "none", "continue"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "bos_token": "BOS"}])
def test_like_transformers(reference, template, messages, ending, variables):
    options = {"add_generation_prompt": ending == "generation", "continue_final_message": ending == "continue"}
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **options, **variables)
    ours = ChatTemplate(template, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    assert ours.render(messages, **options, variables=variables) == expected


def test_tokenized_without_more_special_tokens(reference, model_folder, tokenizer):
    source = find_chat_templates(model_folder, {})["default"]
    messages = CONVERSATIONS[2]
    ours = ChatTemplate(source, {"bos_token": "<|begin|>"}).render(
        messages, add_generation_prompt=True, continue_final_message=False, variables={}
    )
    expected = reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode(ours, add_special_tokens=False).ids == list(expected)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.upper() }}", "has no element 5"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_refusal_is_the_clients_error(source, complaint):
    with pytest.raises(ApiError, match=complaint) as refusal:
        ChatTemplate(source, {}).render(
            [{"role": "user", "content": "x"}], add_generation_prompt=True, continue_final_message=False, variables={}
        )
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_a_request_may_not_replace_what_the_gateway_gives():
    with pytest.raises(ApiError, match="may not set 'messages'"):
        ChatTemplate("", {}).render(
            [{"role": "user"}], add_generation_prompt=True, continue_final_message=False, variables={"messages": []}
        )


def test_a_variable_may_have_any_other_name():
    variables = {"self": "a", "args": "b", "kwargs": "c", "": "d"}
    template = ChatTemplate("{{ args }}{{ kwargs }}{{ messages[0].content }}", {})
    messages = [{"role": "user", "content": "x"}]
    options = {"add_generation_prompt": True, "continue_final_message": False}
    assert template.render(messages, **options, variables=variables) == "bcx"


def test_nesting_that_no_template_can_write():
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}", {})
    with pytest.raises(ApiError) as caught:
        template.render(
            [{"role": "assistant", "tool_calls": deep}],
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_continuing_needs_the_message_in_the_prompt():
    with pytest.raises(ApiError, match="does not keep"):
        ChatTemplate("nothing", {}).render(
            [{"role": "assistant", "content": "x"}],
            add_generation_prompt=False,
            continue_final_message=True,
            variables={},
        )


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        ("from file", {"chat_template": "from config"}, "from file"),
        (None, {"chat_template": "from config"}, "from config"),
        (
            None,
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "named"}]},
            "named",
        ),
        (None, {"chat_template": [{"name": "tool_use", "template": "t"}]}, None),
        (None, {}, None),
    ],
)
def test_where_templates_are_found(tmp_path, file, config, expected):
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert find_chat_templates(tmp_path, config).get("default") == expected


def test_special_tokens_as_transformers_reads_them(tmp_path, tokenizer):
    folder = write_model(tmp_path / "m", tokenizer)
    assert read_tokenizer(folder).names == PreTrainedTokenizerFast.from_pretrained(folder).special_tokens_map


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ messages }}{% endfor %}{% endfor %}", "characters"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ '' }}{% endfor %}{% endfor %}", "seconds"),
    ],
)
def test_a_template_that_does_not_end(source: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_gateway.models.chat_template.MAX_RENDER_S", 0.5 if why == "seconds" else 60)
    template = ChatTemplate(source, {})
    with pytest.raises(ApiError, match=f"more than [0-9]+ {why}") as caught:
        template.render(
            [{"role": "user", "content": "x" * 1000}],
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
    assert (caught.value.status, caught.value.param) == (400, "messages")
