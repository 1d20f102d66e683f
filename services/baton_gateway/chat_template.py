"""Writes a conversation as a prompt, as `apply_chat_template` of transformers does."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton_gateway.bounds import MAX_RENDER_S, MAX_RENDERED_CHARS
from baton_gateway.errors import bad_request

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What the gateway itself gives to a template: a request may not replace it.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the model's default template: chat_template.jinja, or else the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates refer to by name."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled Jinja chat template. Templates come with models, so they run in a sandbox."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """tokens: special tokens by the names the template uses.

        Raises jinja2.TemplateError when the template cannot be compiled.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tokens = dict(tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
        param: str = "messages",
    ) -> str:
        """Write `messages` as a prompt.

        continue_final_message: leave the last message open, so that the model goes on with it.
        variables: more variables for the template. tools: what the model may call.
        param: the request field that an error is about.
        Raises ApiError when the template refuses the messages.
        """
        if reserved := RESERVED.intersection(variables):
            raise bad_request(f"'chat_template_kwargs' may not set '{min(reserved)}'.", "chat_template_kwargs")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        final = messages[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise bad_request("The final message has no content to continue.", "continue_final_message")
            messages[-1] = messages[-1] | {"content": final + CONTINUE_TAG}
        prompt = self._render(messages, add_generation_prompt, variables, tools, param)
        return _cut_at_tag(prompt, str(final)) if continue_final_message else prompt

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: list[dict[str, Any]] | None,
        param: str,
    ) -> str:
        try:
            # One mapping and no keyword arguments: a variable of any name, even `self`, is none of the method's own.
            return _bounded(
                self._template.generate(
                    {
                        **self._tokens,
                        **variables,
                        "messages": messages,
                        "tools": tools,
                        "documents": None,
                        "add_generation_prompt": add_generation_prompt,
                    }
                ),
                param,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, OverflowError) as e:
            raise bad_request(f"The chat template refused the messages: {e}", param) from None
        except RecursionError:
            raise bad_request("The messages are nested too deep for the chat template.", param) from None


def _bounded(pieces: Iterator[str], param: str) -> str:
    """Join what a template writes. Raises ApiError when that is too much, or takes too long."""
    written, size, until = [], 0, time.monotonic() + MAX_RENDER_S
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise bad_request(f"The chat template makes more than {MAX_RENDERED_CHARS} characters of this.", param)
        if time.monotonic() > until:
            raise bad_request(f"The chat template takes more than {MAX_RENDER_S:.0f} seconds for this.", param)
    return "".join(written)


def _cut_at_tag(prompt: str, final: str) -> str:
    tag = CONTINUE_TAG.strip()
    if tag not in prompt or final.strip() not in prompt:
        raise bad_request("The chat template does not keep the final message.", "continue_final_message")
    start = prompt.rindex(tag)
    if prompt[start : start + len(CONTINUE_TAG)] == CONTINUE_TAG:
        return prompt[:start]
    return prompt[:start].rstrip()
