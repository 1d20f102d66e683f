"""Facts about a model, read from its config and the headers of its weights without loading any tensor."""

import json
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from baton_cli.errors import UserError

_LARGEST_HEADER = 100 << 20  # bytes; the limit of the format's own library


def model_facts(folder: Path) -> dict[str, str]:
    """Return facts for display, by label. Raises UserError.

    It reads config.json and the safetensors headers (a little-endian u64 length, then JSON; see the format description
    of safetensors).
    """
    config = _config(folder)
    parameters = _parameters(folder)
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return {
        "architecture": ", ".join(config.get("architectures") or ["unknown"]),
        "parameters": f"{sum(parameters.values()):,}",
        "dtype": ", ".join(dtype for dtype, _ in parameters.most_common()),
        "layers": str(config.get("num_hidden_layers", "unknown")),
        "heads": f"{heads or 'unknown'} ({kv_heads or heads or 'unknown'} for keys and values)",
        "hidden size": str(config.get("hidden_size", "unknown")),
        "vocabulary": str(config.get("vocab_size", "unknown")),
        "context": f"{config.get('max_position_embeddings', 'unknown')} tokens",
    }


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no model folder: cannot read its config.json ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder}/config.json holds no object")
    return config


def _parameters(folder: Path) -> Counter[str]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no .safetensors files")
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(_count(file))
    return counts


def _count(file: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[tensor["dtype"]] += prod(tensor["shape"])
    except (OSError, ValueError, TypeError, AttributeError, KeyError, struct.error) as error:
        raise UserError(f"{file} is no safetensors file ({error})") from None
    return counts
