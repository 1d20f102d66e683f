"""The text part of ERNIE 4.5 VL (Baidu, 2025): ERNIE 4.5 with experts, of which text uses the first ones."""

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import rope_fields
from baton_engine.source import Source

from .ernie4_5_moe import Ernie45Moe, Ernie45MoeLayer
from .llama import LlamaConfig
from .sparse_config import SparseConfig, read_layers_without_experts

# Where config.json has a number for text and one for images.
_PAIRS = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")


class Ernie45VlLayer(Ernie45MoeLayer):
    router_transposed = True

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        name, shape = "moe_statics.e_score_correction_bias", (2, config.num_experts)
        return source.take(name, shape, (slice(0, 1),), torch.float32)[0]


class Ernie45Vl(Ernie45Moe):
    layer = Ernie45VlLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # Text has the same position in all sections, so that their frequencies are those of a rope without sections.
        rope = ConfigFile(rope_fields(file))
        rope.choice("rope_type", "default", ("default", "mrope"))
        rope.choice("type", "default", ("default", "mrope"))
        text = {name: value[0] for name in _PAIRS if isinstance(value := file.fields.get(name), list) and value}
        config = super().read_config(ConfigFile({**file.fields, **text}))
        assert isinstance(config, SparseConfig)
        if file.fields.get("mlp_layer_types") is None:
            return config
        dense = read_layers_without_experts(file, config.num_layers, 1)
        return msgspec.structs.replace(config, dense_layers=dense)
