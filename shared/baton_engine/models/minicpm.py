"""MiniCPM 1, 2 and 4 (OpenBMB, 2024 and 2025): Llama with Granite's factors, which depend on the model's size.

Models with a sparse_config attend to all tokens up to dense_len, and to some of them beyond it. They are served up to
dense_len.
"""

import math
from typing import Self

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import rope_fields

from .granite import Granite, GraniteConfig, Multipliers
from .llama import SILU, Defaults, LlamaConfig, read_llama_config

_CONTEXT = 2048


class MiniCpmConfig(GraniteConfig, frozen=True, kw_only=True):
    longest_dense: int | None  # the most tokens among which attention is dense; None = any number

    @property
    def default_model_len(self) -> int:
        return min(self.max_position_embeddings, self.longest_dense or self.max_position_embeddings)

    def limited(self, max_positions: int) -> Self:
        if self.longest_dense is not None and max_positions > self.longest_dense:
            raise ConfigError(
                f"sparse_config in config.json makes attention sparse beyond {self.longest_dense} tokens, which is not "
                f"served: --max-model-len {max_positions} must not be more"
            )
        return super().limited(max_positions)


class MiniCpm(Granite):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("num_experts", 0)
        hidden, layers, bias = file.count("hidden_size"), file.count("num_hidden_layers"), file.flag("attention_bias")
        file.require_absent("head_dim", hidden // file.count("num_attention_heads"))
        return read_llama_config(
            MiniCpmConfig,
            _with_longrope(file),
            Defaults(_CONTEXT, tie_word_embeddings=True),
            activations=SILU,
            qkv_bias=bias,
            output_bias=bias,
            multipliers=Multipliers(
                file.number("scale_emb", 1.0),
                file.number("scale_depth", 1.0) / math.sqrt(layers),
                hidden / file.count("dim_model_base", 1),
            ),
            longest_dense=_longest_dense(file),
        )


def _longest_dense(file: ConfigFile) -> int | None:
    if file.fields.get("sparse_config") is None:
        return None
    length = file.part("sparse_config").fields.get("dense_len", 8192)
    if not isinstance(length, int) or length < 2:
        raise ConfigError(f"dense_len {length!r} of sparse_config in config.json is not served: it must be at least 2")
    return length - 1


def _with_longrope(file: ConfigFile) -> ConfigFile:
    """Return the fields with longrope as MiniCPM means it: max_position_embeddings alone, instead of the length of the
    texts, decides which factors apply, and the field `factor` has no effect."""
    scaling = rope_fields(file)
    if (scaling.get("rope_type") or scaling.get("type")) != "longrope":
        return file
    context = file.count("max_position_embeddings", _CONTEXT)
    original = ConfigFile(scaling).count("original_max_position_embeddings")
    if not 1 < original <= context:
        raise ConfigError(
            f"original_max_position_embeddings {original} in config.json must be above 1, and not above "
            f"max_position_embeddings {context}"
        )
    growth = context / original
    scaling |= {"factor": growth, "attention_factor": math.sqrt(1 + math.log(growth) / math.log(original))}
    if growth > 1:
        scaling["short_factor"] = scaling.get("long_factor")
    replaced = {"rope_scaling": scaling, "rope_parameters": None, "original_max_position_embeddings": None}
    return ConfigFile({**file.fields, **replaced})
