"""Families that transformers lacks, which are checked against models of its families that compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.common.qwen_model import write_qwen

from . import renamed_dense, renamed_experts, renamed_fused, renamed_images

# Takes a family of transformers and fields of its configuration class; writes a model of it and returns its folder.
MakeReference = Callable[..., Path]


def _write_qwen(folder: Path, make_reference: MakeReference, overrides: dict[str, Any]) -> None:
    write_qwen(folder, make_reference("qwen2", **{"num_key_value_heads": 4, **overrides}))


# For each family, what makes a reference and writes config.json and the same weights as the family has them into a
# folder. The last argument has fields of a configuration class.
RENAMED: dict[str, Callable[[Path, MakeReference, dict[str, Any]], None]] = {
    "qwen": _write_qwen, **renamed_dense.RENAMED, **renamed_fused.RENAMED, **renamed_experts.RENAMED,
    **renamed_images.RENAMED,
}  # fmt: skip
