"""InternLM of the first generation (InternLM Team, 2023): Llama with biases of attention, and another field for the
rotation."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config


class InternLm(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        rotary, bias = file.part("rotary"), file.flag("bias", True)
        # Dynamic scaling begins beyond max_position_embeddings.
        rotary.choice("type", "dynamic", ("dynamic", "origin"))
        rope = Rope("default", rotary.number("base", 10000.0))
        return read_llama_config(
            LlamaConfig, file, Defaults(2048), rope=rope, activations=SILU, qkv_bias=bias, output_bias=bias
        )
