"""Finds the chat templates in a model's folder, in all layouts in which models are published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

DEFAULT = "default"
MAX_TEMPLATES = 32
MAX_TEMPLATE_BYTES = 4 * 1024 * 1024


def find_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name. A file replaces a template of the same name in tokenizer_config.json.

    The names are those of transformers: `default`, and for example `tool_use` and `rag`. Raises ValueError when a
    template cannot be read.
    """
    found = _listed(tokenizer_config.get("chat_template"), "tokenizer_config.json")
    if (file := folder / "chat_template.json").is_file():
        content = msgspec.json.decode(_read(file))
        found |= _listed(content.get("chat_template") if isinstance(content, dict) else None, file.name)
    if (file := folder / "chat_template.jinja").is_file():
        found[DEFAULT] = _read(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))[: MAX_TEMPLATES + 1]:
        found[file.stem] = _read(file)
    if len(found) > MAX_TEMPLATES:
        raise ValueError(f"the model has more than {MAX_TEMPLATES} chat templates")
    return found


def _listed(given: Any, file: str) -> dict[str, str]:
    """Return the templates that are given as one text, or as a list of names and texts."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    entries = [{"name": name, "template": text} for name, text in given.items()] if isinstance(given, dict) else given
    if not isinstance(entries, list):
        raise ValueError(f"{file}: chat_template must be a text, or a list of names and texts")
    found: dict[str, str] = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"{file}: an entry of chat_template lacks a name or a template")
        found[name] = text
    return found


def _read(file: Path) -> str:
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file} has more than {MAX_TEMPLATE_BYTES} bytes")
    return file.read_text(encoding="utf-8")
