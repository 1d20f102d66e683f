"""The formats in which families of models write thoughts, and how a chat template reveals its format."""

from typing import Literal

from .answer_tags import HunyuanThoughts, ResponseTags
from .gemma import GemmaThoughts
from .granite import GraniteThoughts
from .harmony import HarmonyThoughts
from .mistral import MistralThoughts
from .prefixed_tags import LongCatThoughts, SeedThoughts
from .think import ThinkTags
from .thought_reader import ThoughtReader

ReasoningFormat = Literal[
    "auto", "think", "think_response", "hunyuan", "granite", "seed_oss", "longcat", "harmony", "mistral", "gemma",
    "none",
]  # fmt: skip

# In the order in which a template is compared with them.
FORMATS: dict[ReasoningFormat, type[ThoughtReader]] = {
    "harmony": HarmonyThoughts,
    "gemma": GemmaThoughts,
    "mistral": MistralThoughts,
    "seed_oss": SeedThoughts,
    "longcat": LongCatThoughts,
    "granite": GraniteThoughts,
    "think_response": ResponseTags,
    "hunyuan": HunyuanThoughts,
    "think": ThinkTags,
}


def find_thoughts(format: ReasoningFormat, template: str | None) -> type[ThoughtReader] | None:
    """Return the reader of a format. auto: the format in which models with this chat template write thoughts."""
    if format != "auto":
        return FORMATS.get(format)
    return next((reader for reader in FORMATS.values() if template and reader.writes(template)), None)
