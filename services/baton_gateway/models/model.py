"""A model that the gateway serves: tokenizer, chat template and defaults, all read from the model's folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from baton_tokenizer.load import read_tokenizer

from ..errors import bad_request
from ..reasoning.formats import find_thoughts
from ..reasoning.thought_reader import ThoughtReader
from ..tools.tool_formats import find_parser
from ..tools.tool_parser import ToolParser
from .chat_format import find_chat_format
from .chat_template import ChatTemplate
from .chat_tokens import ChatTokens
from .conversation import Conversation
from .models_file import ModelSpec
from .named_chats import NamedChats
from .published import PublishedPrefixes, publish
from .template_files import DEFAULT, find_chat_templates
from .template_roles import TemplateRoles
from .tokenizer import ModelTokenizer


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling parameters. They are neutral unless the model's generation config sets them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ServedModel:
    """A model under the name that clients use for it.

    chat: None when the model has no chat template. tool_parser, thoughts: read the tool calls and the thoughts that the
    model writes.
    """

    name: str
    tokenizer: ModelTokenizer
    chat: NamedChats | None
    tool_parser: type[ToolParser] | None
    thoughts: type[ThoughtReader] | None
    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]
    published: PublishedPrefixes = field(default_factory=PublishedPrefixes)

    def chat_tokens(self, conversation: Conversation) -> list[int]:
        """Return the prompt's token ids for a conversation. May be called in any thread.

        Raises ApiError when the conversation cannot be rendered.
        """
        if self.chat is None:
            raise bad_request("This model has no chat template; use /v1/completions.", conversation.param)
        return self.chat.encode(conversation)


class ModelError(ValueError):
    """A model's folder is incomplete or unusable. The message names the folder and the reason."""


def load_model(spec: ModelSpec) -> ServedModel:
    """Read the tokenizer, the chat template and the defaults of a model. Raises ModelError."""
    try:
        return _load(spec)
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise ModelError(f"cannot load the model from {spec.folder}: {error}") from None


def _load(spec: ModelSpec) -> ServedModel:
    folder = spec.folder
    config = _read_json(folder / "config.json")
    generation_config = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    text = read_tokenizer(folder)
    tokens = text.names
    tokenizer = ModelTokenizer(text.load())
    if spec.chat_template is not None:
        sources = {DEFAULT: spec.chat_template.read_text(encoding="utf-8")}
    else:
        sources = find_chat_templates(folder, tokenizer_config)
    eos_token_ids = _eos_token_ids(config, generation_config, tokenizer, tokens)
    if (chat_format := find_chat_format(generation_config)) is not None:
        sources.setdefault(DEFAULT, chat_format.template)
        ends = (tokenizer.token_id(token) for token in chat_format.ends)
        eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(id for id in ends if id is not None))))
    chat = None
    if sources:
        named = [id for token in tokens.values() if (id := tokenizer.token_id(token)) is not None]
        control = tokenizer.control_tokens({*named, *eos_token_ids})
        policy = spec.special_tokens_in_content or "text"
        templates = {name: ChatTemplate(source, tokens) for name, source in sources.items()}
        chat = NamedChats(
            {
                name: ChatTokens(template, TemplateRoles(template), tokenizer, control, policy)
                for name, template in templates.items()
            }
        )
    written = "\n".join(sources.values())  # the formats of answers appear in any of the templates
    return ServedModel(
        name=spec.name,
        tokenizer=tokenizer,
        chat=chat,
        tool_parser=find_parser(spec.tool_call_parser, written),
        thoughts=find_thoughts(spec.reasoning_parser, written),
        defaults=_sampling_defaults(generation_config) if spec.use_generation_config else SamplingDefaults(),
        eos_token_ids=eos_token_ids,
        published=publish(spec.published_prefixes, tokenizer, chat.default if chat is not None else None),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    names = SamplingDefaults.__dataclass_fields__
    return SamplingDefaults(**{k: v for k, v in generation_config.items() if k in names and v is not None})


def _eos_token_ids(
    config: dict[str, Any], generation_config: dict[str, Any], tokenizer: ModelTokenizer, tokens: dict[str, str]
) -> tuple[int, ...]:
    """Return the end-of-text ids of the generation config, or else of the model config, and that of the tokenizer."""
    ids: list[int] = []
    for eos in (generation_config.get("eos_token_id", config.get("eos_token_id")), _eos_of(tokenizer, tokens)):
        ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))


def _eos_of(tokenizer: ModelTokenizer, tokens: dict[str, str]) -> int | None:
    return tokenizer.token_id(tokens["eos_token"]) if "eos_token" in tokens else None
