"""The formats in which families of models write tool calls, and how a chat template reveals its format."""

from typing import Literal

from .deepseek import DeepSeekParser, DeepSeekV3Parser
from .deepseek_dsml import DeepSeekV4Parser, DeepSeekV32Parser
from .gemma import GemmaParser
from .glm import GlmParser
from .granite import GraniteParser
from .granite_20b import Granite20bParser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .kimi import KimiParser
from .llama3 import Llama3Parser
from .longcat import LongCatParser
from .minimax import MiniMaxParser
from .mistral import MistralParser
from .phi4_mini import Phi4MiniParser
from .pythonic import PythonicParser
from .pythonic_section import Lfm2Parser, Olmo3Parser
from .qwen3_coder import Qwen3CoderParser
from .seed_oss import SeedOssParser
from .step3 import Step3Parser
from .tagged_list import NemotronParser, TaggedListParser
from .tool_parser import ToolParser

ToolFormat = Literal[
    "auto", "deepseek", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma", "glm", "granite", "granite_20b",
    "harmony", "hermes", "hunyuan", "kimi", "lfm2", "llama3_json", "longcat", "minimax", "mistral", "nemotron",
    "olmo3", "phi4_mini", "pythonic", "qwen3_coder", "seed_oss", "step3", "none",
]  # fmt: skip

# In the order in which a template is compared with them: some markers are shared, and the stricter format comes first.
PARSERS: dict[ToolFormat, type[ToolParser]] = {
    "harmony": HarmonyParser,
    "gemma": GemmaParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek": DeepSeekParser,
    "deepseek_v4": DeepSeekV4Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "minimax": MiniMaxParser,
    "step3": Step3Parser,
    "seed_oss": SeedOssParser,
    "longcat": LongCatParser,
    "lfm2": Lfm2Parser,
    "phi4_mini": Phi4MiniParser,
    "kimi": KimiParser,
    "glm": GlmParser,
    "qwen3_coder": Qwen3CoderParser,
    "granite": GraniteParser,
    "granite_20b": Granite20bParser,
    "nemotron": NemotronParser,
    "olmo3": Olmo3Parser,
    "hermes": HermesParser,
    "hunyuan": TaggedListParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "llama3_json": Llama3Parser,
}


def find_parser(format: ToolFormat, template: str | None) -> type[ToolParser] | None:
    """Return the parser of a format. auto: the format in which the chat template writes calls."""
    if format != "auto":
        return PARSERS.get(format)
    return next((parser for parser in PARSERS.values() if template and parser.writes(template)), None)
