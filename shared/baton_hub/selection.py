"""Which files of a model's repository Baton reads. Pickles, code and formats of other programs are never among them."""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase

from .errors import HubError
from .listing import TEMPLATES

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
LARGEST_INDEX = 64 << 20  # bytes; those of the largest models have a few MiB

# What gateways and workers read beside the weights.
_TEXT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tiktoken.model",
    "*.tiktoken",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.jinja",
    "chat_template.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)


def text_files(names: Iterable[str]) -> list[str]:
    """Return the names of the files that gateways need: config, tokenizer, chat template, licence."""
    return [name for name in names if any(fnmatchcase(_at_root(name), pattern) for pattern in _TEXT)]


def _at_root(name: str) -> str:
    """Return a name without the folder of templates; "" for a file in another folder."""
    folder, _, base = name.rpartition("/")
    return base if not folder or (folder == TEMPLATES and base.endswith(".jinja")) else ""


def weight_files(names: Iterable[str], index: bytes | None) -> list[str]:
    """Return the names of the safetensors files to load. index: the content of the file INDEX, if there is one.

    Raises HubError when there are none, or when the index names a file that the repository does not have.
    """
    present = {name for name in names if "/" not in name and name.endswith(".safetensors")}
    if index is None:
        if _WHOLE not in present:
            raise HubError(f"the repository has neither {_WHOLE} nor {INDEX}; no other weights are read")
        return [_WHOLE]
    named = _named(index)
    if missing := sorted(named - present):
        raise HubError(f"{INDEX} names {missing[0]!r}, which is no safetensors file at the root of the repository")
    return sorted(named)


def _named(index: bytes) -> set[str]:
    if len(index) > LARGEST_INDEX:
        raise HubError(f"{INDEX} has more than {LARGEST_INDEX} bytes, which is too much for an index")
    try:
        named = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{INDEX} is not an index of safetensors files ({type(error).__name__})") from None
    if not named or not all(isinstance(name, str) for name in named):
        raise HubError(f"{INDEX} is not an index of safetensors files: its weight_map names no files")
    return named
