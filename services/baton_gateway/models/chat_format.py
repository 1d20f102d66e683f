"""Chat formats of models that are older than chat templates. Their generation_config.json names the format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Qwen's code of the first generation begins each conversation with this system message if there is no other.
_CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class ChatFormat:
    """template: renders a conversation in this format. ends: tokens that end a turn."""

    template: str
    ends: tuple[str, ...]


_FORMATS = {"chatml": ChatFormat(_CHATML, ("<|im_end|>", "<|im_start|>"))}


def find_chat_format(generation_config: Mapping[str, Any]) -> ChatFormat | None:
    """Return the chat format of a model; None when it has none, or one that is not known."""
    name = generation_config.get("chat_format")
    return _FORMATS.get(name) if isinstance(name, str) else None
