"""VaultGemma (Google, 2025): Gemma 2 without norms after its blocks."""

from typing import Any

import msgspec

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .gemma import Gemma
from .gemma2 import read_softcaps
from .gemma3 import set_softcap
from .llama import Defaults, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import windows_in_turn


class VaultGemmaConfig(LlamaConfig, frozen=True, kw_only=True):
    logit_softcap: float  # as in Gemma2Config

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "softcaps": [spec.softcap for spec in self.attention]}


class VaultGemmaLayer(LlamaLayer):
    norms = ("input_layernorm", "pre_feedforward_layernorm")


class VaultGemma(Gemma):
    layer = VaultGemmaLayer

    def __init__(self, config: VaultGemmaConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        set_softcap(self.head, config.logit_softcap)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        softcap, logit_softcap = read_softcaps(file)
        layers, bias = file.count("num_hidden_layers", 26), file.flag("attention_bias")
        config = read_llama_config(
            VaultGemmaConfig,
            ConfigFile({**file.fields, "hidden_act": file.fields.get("hidden_activation")}),
            Defaults(8192, num_kv_heads=4, head_dim=256, tie_word_embeddings=True),
            windows_in_turn(file, layers, 2),
            scale=file.number("query_pre_attn_scalar", 256) ** -0.5,
            activation="gelu_pytorch_tanh",
            norm_offset=1.0,
            qkv_bias=bias,
            output_bias=bias,
            logit_softcap=logit_softcap,
        )
        specs = tuple(msgspec.structs.replace(spec, softcap=softcap) for spec in config.attention)
        return msgspec.structs.replace(config, attention=specs)
