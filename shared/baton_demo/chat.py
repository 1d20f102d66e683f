"""The chat format: special tokens, the Jinja template that servers render, and the same format as training text."""

from dataclasses import dataclass

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
END = "<|end|>"
PAD = "<|pad|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
SPECIAL_TOKENS = (BOS, EOS, END, PAD, *ROLE_TOKENS.values())

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception("Unknown role '" ~ role ~ "': use system, developer, user, assistant or tool") }}
    {%- endif %}
    {{- '<|' ~ role ~ '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] %}
        {%- for part in message['content'] %}
            {%- if part['type'] != 'text' %}
                {{- raise_exception("Content of type '" ~ part['type'] ~ "' is not supported: this model reads text") }}
            {%- endif %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- call['function'] | tojson }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Segment:
    """A piece of text. It contributes to the loss only if learn is true."""

    text: str
    learn: bool = False


def turn(role: str, content: str) -> list[Segment]:
    """Return one message as the template renders it. Only the assistant's content and its END token are learned."""
    learn = role == "assistant"
    return [Segment(ROLE_TOKENS[role]), Segment(content + END, learn)]
