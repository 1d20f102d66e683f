"""Solar Open (Upstage, 2025): GLM-4.5's experts in all layers, and heads that rotate as a whole."""

from baton_engine.config_file import ConfigFile

from .glm4_moe import Glm4Moe
from .llama import LlamaConfig

# Those of transformers' configuration class.
_DEFAULTS = {"moe_intermediate_size": 1280, "head_dim": 128, "rope_theta": 1e6, "partial_rotary_factor": 1.0}


class SolarOpen(Glm4Moe):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # transformers computes experts in all layers and no norms of heads, whatever these fields say.
        file.require_absent("first_k_dense_replace", 0)
        file.require_absent("use_qk_norm", False)
        # All layers have experts, so no MLP has a size of its own.
        size = {"intermediate_size": file.count("moe_intermediate_size", 1280), "first_k_dense_replace": 0}
        return super().read_config(ConfigFile({**file.with_defaults(_DEFAULTS).fields, **size}))
