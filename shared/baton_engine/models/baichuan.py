"""Baichuan and Baichuan 2 (Yang et al., 2023): Llama with one matrix for queries, keys and values.

The models of 7B rotate queries and keys, those of 13B have ALiBi. Baichuan 2 scales the head's weights of each token to
length 1.
"""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Head, unit_head
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .bloom import with_alibi
from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, fused_qkv, read_llama_config
from .unrotated import NO_ROPE

# Only this field of a config.json differs between the two generations. Fine-tuned models may have more tokens.
_TOKENS_OF_BAICHUAN_2 = 125696
# Whether models with hidden states of these sizes, which are those of 7B and 13B, rotate queries and keys.
_ROTATED = {4096: True, 5120: False}


class BaichuanConfig(LlamaConfig, frozen=True, kw_only=True):
    unit_head: bool  # the head's weights of each token have length 1

    def rope_of(self, layer: int) -> Rope | None:
        return None if self.rope == NO_ROPE else self.rope


class BaichuanLayer(LlamaLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_qkv(config, source, "W_pack")


class Baichuan(Llama):
    layer = BaichuanLayer

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        assert isinstance(config, BaichuanConfig)
        return unit_head(source, self.embedding) if config.unit_head else super().make_head(config, source)

    @classmethod
    def read_config(cls, file: ConfigFile) -> BaichuanConfig:
        file.require_absent("tie_word_embeddings", False)
        # The configuration class of the models with ALiBi does not have the first of these fields.
        context = file.count("max_position_embeddings", file.count("model_max_length", 4096))
        named = file.fields.get("max_position_embeddings") is not None
        rotated = file.architecture == "BaiChuanForCausalLM" or _ROTATED.get(file.count("hidden_size"), named)
        config = read_llama_config(
            BaichuanConfig,
            file,
            Defaults(context),
            activations=SILU,
            rope=Rope("default", 10000.0) if rotated else NO_ROPE,
            unit_head=file.count("vocab_size") >= _TOKENS_OF_BAICHUAN_2,
        )
        return config if rotated else with_alibi(config)
