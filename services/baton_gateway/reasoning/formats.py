"""The formats in which families of models write thoughts, and how a chat template reveals its format."""

from typing import Literal

from .gemma import GemmaThoughts
from .harmony import HarmonyThoughts
from .mistral import MistralThoughts
from .think import ThinkTags
from .thought_reader import ThoughtReader

ReasoningFormat = Literal["auto", "think", "harmony", "mistral", "gemma", "none"]

# In the order in which a template is compared with them.
FORMATS: dict[ReasoningFormat, type[ThoughtReader]] = {
    "harmony": HarmonyThoughts,
    "gemma": GemmaThoughts,
    "mistral": MistralThoughts,
    "think": ThinkTags,
}


def find_thoughts(format: ReasoningFormat, template: str | None) -> type[ThoughtReader] | None:
    """Return the reader of a format. auto: the format in which models with this chat template write thoughts."""
    if format != "auto":
        return FORMATS.get(format)
    return next((reader for reader in FORMATS.values() if template and reader.writes(template)), None)
