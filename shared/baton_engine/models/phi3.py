"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with fused projections; Phi-4-mini rotates a part of each head."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import read_rope, rope_fields
from baton_engine.shard import Columns
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, fused_qkv, read_llama_config
from .sliding_windows import same_window


class Phi3Layer(LlamaLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_qkv(config, source, "qkv_proj")

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source)


def fused_gate_up(config: LlamaConfig, source: Source, name: str = "gate_up_proj") -> Linear:
    """Return the gates and ups of an MLP that a checkpoint holds as one matrix. name: of the matrix."""
    inner, bias, shard = config.intermediate_size, config.mlp_bias, Columns(source.ranks)
    return Linear(source, [name], [2 * inner], config.hidden_size, bias=bias, parts=[inner, inner], shard=shard)


class Phi3(Llama):
    layer = Phi3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # transformers prefers this default to the same field within rope_scaling.
        file = file.with_defaults({"original_max_position_embeddings": 4096})
        context = file.count("max_position_embeddings", 4096)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            same_window(file),
            rope=read_rope(file, context, partial=1.0),
        )


class Phi4MmLayer(Phi3Layer):
    output, down = "o_proj.base_layer", "down_proj.base_layer"

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_qkv(config, source, "qkv_proj.base_layer")

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source, "gate_up_proj.base_layer")


class Phi4Mm(Phi3):
    """The text part of Phi-4-multimodal as it was first published. Text alone uses none of its adapters."""

    layer = Phi4MmLayer


class Phi3V(Phi3):
    """The text part of Phi-3-vision and Phi-3.5-vision, whose configs have longrope under its first name, su."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        scaling = rope_fields(file)
        if (scaling.get("rope_type") or scaling.get("type")) == "su":
            scaling["rope_type"] = "longrope"
            file = ConfigFile({**file.fields, "rope_scaling": scaling, "rope_parameters": None})
        return super().read_config(file)
