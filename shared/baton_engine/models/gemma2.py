"""Gemma 2 (Gemma Team, 2024): Gemma 3's layers without norms of queries and keys, with softcaps on scores and
logits."""

from typing import Any

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .gemma3 import Gemma3, Gemma3Config, read_gemma_config, read_softcap


class Gemma2Config(Gemma3Config, frozen=True, kw_only=True):
    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "softcaps": [spec.softcap for spec in self.attention]}


def read_softcaps(file: ConfigFile) -> tuple[float, float]:
    """Return the softcaps of scores and of logits."""
    return read_softcap(file, "attn_logit_softcapping", 50.0), read_softcap(file, "final_logit_softcapping", 30.0)


class Gemma2(Gemma3):
    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma2Config:
        layers = file.count("num_hidden_layers", 26)
        types = file.layer_types("layer_types", layers) or [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
        ]
        context = file.count("max_position_embeddings", 8192)
        scores, logits = read_softcaps(file)
        scale, window = file.number("query_pre_attn_scalar", 256) ** -0.5, file.count("sliding_window", 4096)
        rope = read_rope(file, context)
        return read_gemma_config(
            Gemma2Config,
            file,
            context,
            vocab_size=file.count("vocab_size", 256000),
            attention=tuple(
                AttentionSpec(scale=scale, window=window if kind == "sliding_attention" else None, softcap=scores)
                for kind in types
            ),
            rope=rope,
            window_rope=rope,
            qk_norm=False,
            logit_softcap=logits,
        )
