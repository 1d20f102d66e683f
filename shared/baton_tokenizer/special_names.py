"""The special tokens that a model folder names by their role, such as bos_token."""

from collections.abc import Mapping
from typing import Any

from .model_folder import ModelFolder

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_names(folder: ModelFolder, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the special tokens by role, as tokenizer_config.json, or else special_tokens_map.json, or else the kind of
    tokenizer (`defaults`) says. A role that tokenizer_config.json gives to null has no token."""
    names = {**defaults, **named_tokens(folder.fields("special_tokens_map.json"))}
    settings = folder.settings()
    unnamed = {role for role in ROLES if role in settings and settings[role] is None}
    return {role: token for role, token in {**names, **named_tokens(settings)}.items() if role not in unnamed}


def named_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that the fields of one file name by role."""
    tokens = {role: content(fields.get(role)) for role in ROLES}
    return {role: token for role, token in tokens.items() if token is not None}


def content(token: Any) -> str | None:
    """Return the text of a token, which files write as a string or as an object; None for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
