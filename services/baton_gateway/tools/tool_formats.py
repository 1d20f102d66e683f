"""The formats in which families of models write tool calls, and how a chat template reveals its format."""

from typing import Literal

from .deepseek import DeepSeekParser, DeepSeekV3Parser
from .gemma import GemmaParser
from .glm import GlmParser
from .granite import GraniteParser
from .granite_20b import Granite20bParser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .kimi import KimiParser
from .llama3 import Llama3Parser
from .mistral import MistralParser
from .pythonic import PythonicParser
from .qwen3_coder import Qwen3CoderParser
from .tool_parser import ToolParser

ToolFormat = Literal[
    "auto", "deepseek", "deepseek_v3", "gemma", "glm", "granite", "granite_20b", "harmony", "hermes", "kimi",
    "llama3_json", "mistral", "pythonic", "qwen3_coder", "none",
]  # fmt: skip

# In the order in which a template is compared with them: some markers are shared, and the stricter format comes first.
PARSERS: dict[ToolFormat, type[ToolParser]] = {
    "harmony": HarmonyParser,
    "gemma": GemmaParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek": DeepSeekParser,
    "kimi": KimiParser,
    "glm": GlmParser,
    "qwen3_coder": Qwen3CoderParser,
    "granite": GraniteParser,
    "granite_20b": Granite20bParser,
    "hermes": HermesParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "llama3_json": Llama3Parser,
}


def find_parser(format: ToolFormat, template: str | None) -> type[ToolParser] | None:
    """Return the parser of a format. auto: the format in which the chat template writes calls."""
    if format != "auto":
        return PARSERS.get(format)
    return next((parser for parser in PARSERS.values() if template and parser.writes(template)), None)
