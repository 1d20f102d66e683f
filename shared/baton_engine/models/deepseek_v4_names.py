"""The names of tensors in checkpoints of DeepSeek-V4."""

from collections.abc import Collection
from functools import cache

import torch

from baton_engine.source import Source

# What transformers calls tensors in memory, and what the authors call them. transformers writes the authors' names, but
# keeps the name of the embedding, that of the last gates and the prefix of all but the head.
_AUTHORS = (
    (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".sinks", ".attn_sink"),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".position_bias", ".ape"),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".q_a_norm.", ".q_norm."),
    (".compressor.kv_proj.", ".compressor.wkv."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".attn.kv_proj.", ".attn.wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
    (".weight_scale_inv", ".scale"),
)
_PREFIX = "model."
_OUTSIDE = (("embed_tokens.", "embed."), ("lm_head.", "head."), ("hc_head.hc_", "hc_head_"))


# The endings of names in MXFP4 of gpt-oss, in which the authors store experts by names of their own.
_CODES, _EXPONENTS = "_blocks", "_scales"


class StoredNames:
    """Implements Tensors by the names that transformers has in memory, for a checkpoint with these or others.

    The authors' experts in MXFP4 have the names and shapes of baton_engine.quantization.mxfp4.
    """

    def __init__(self, source: Source) -> None:
        self.dtype, self.device = source.dtype, source.device
        self._source, self._found = source, cache(self._find)

    def __contains__(self, name: str) -> bool:
        if name.endswith(_CODES):
            found = self._found(f"{name.removesuffix(_CODES)}.weight")
            return found in self._source and self._source.stored_dtype(found) == torch.int8
        return self._found(name) in self._source

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if name.endswith(_CODES):
            # Two codes are in a byte, and a group of an output has 16 bytes.
            outputs, groups, size = shape
            columns = slice(part[1].start * size, part[1].stop * size) if part else slice(0, groups * size)
            rows = part[0] if part else slice(0, outputs)
            name = self._found(f"{name.removesuffix(_CODES)}.weight")
            pairs = self._source.take(name, (outputs, groups * size), (rows, columns), torch.int8)
            return pairs.view(torch.uint8).view(len(pairs), -1, size)
        if name.endswith(_EXPONENTS):
            name = self._found(f"{name.removesuffix(_EXPONENTS)}.weight_scale_inv")
            return self._source.take(name, shape, part, torch.float8_e8m0fnu).view(torch.uint8)
        return self._source.take(self._found(name), shape, part, dtype)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._source.stored_dtype(self._found(name))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._source.stored_shape(self._found(name))

    def leave(self, prefix: str, numbers: Collection[int]) -> None:
        for known in _names(prefix):
            self._source.at(known.removesuffix(".")).leave(numbers)

    def _find(self, name: str) -> str:
        """Return the name of a tensor in the checkpoint, or the one given if there is no such tensor."""
        return next((known for known in _names(name) if known in self._source), name)


def _names(name: str) -> list[str]:
    """Return the names that a tensor may have. name: that of transformers."""
    written = name
    for own, other in _AUTHORS:
        written = written.replace(own, other)
    published = written.removeprefix(_PREFIX)
    for own, other in _OUTSIDE:
        published = other + published.removeprefix(own) if published.startswith(own) else published
    # By its rules, transformers writes this norm by the name of those in compressors.
    return [name, written, published, *(each.replace(".attn.kv_norm.", ".attn.norm.") for each in (written, published))]
