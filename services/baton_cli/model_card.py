"""Facts from a model folder's other files: the licence, and whether there is a chat template."""

import json
import re
from pathlib import Path

import msgspec

# Longer lines are cut. Some licences are one line.
_LINE_CHARACTERS = 120
_LICENCE_NAMES = re.compile(r"(licen[cs]e|copying|usage_policy)", re.IGNORECASE)
_FRONT_MATTER_FIELD = re.compile(r"(license|license_name|license_link):\s*(.*)")
_MOST_CHARACTERS = 1 << 20


class Licence(msgspec.Struct, frozen=True):
    """file, first_line: the licence file's name and first line. declared: the license fields of README.md's front
    matter."""

    file: str | None
    first_line: str | None
    declared: dict[str, str]


def read_licence(folder: Path) -> Licence:
    files = sorted(path for path in folder.iterdir() if path.is_file() and _LICENCE_NAMES.match(path.name))
    first_line = None
    if files:
        lines = (line.strip() for line in _text(files[0]).splitlines())
        first_line = next((line[:_LINE_CHARACTERS] for line in lines if line), "")
    return Licence(files[0].name if files else None, first_line, _declared(folder / "README.md"))


def chat_template_file(folder: Path) -> str | None:
    """Return the name of the file that holds the chat template; None when there is none."""
    if (folder / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    name = "tokenizer_config.json"
    try:
        fields = json.loads((folder / name).read_bytes())
    except (OSError, ValueError):
        return None
    return name if isinstance(fields, dict) and fields.get("chat_template") else None


def _declared(readme: Path) -> dict[str, str]:
    """Return the license fields between the two lines `---` with which a model card begins."""
    lines = _text(readme).splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    fields: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            return fields
        match = _FRONT_MATTER_FIELD.fullmatch(line.rstrip())
        if match:
            fields[match[1]] = match[2].strip("'\" ")[:_LINE_CHARACTERS]
    return {}


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_CHARACTERS)
