"""Hunyuan-A13B (Tencent, 2025): Hunyuan with experts, one of which all tokens use."""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .deepseek_experts import UncorrectedExpertsLayer
from .hunyuan import HunYuan, HunYuanLayer, read_hunyuan_config
from .llama import LlamaConfig
from .sparse_config import SparseConfig


class HunYuanMoeLayer(HunYuanLayer, UncorrectedExpertsLayer):
    router = "gate.wg"
    shared = "shared_mlp"


class HunYuanMoe(HunYuan):
    layer = HunYuanMoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in (("use_mixed_mlp_moe", True), ("norm_topk_prob", True), ("moe_layer_num_skipped", 0)):
            file.require_absent(name, value)
        file.require_absent("group_limited_greedy", False)
        size = file.count("intermediate_size")
        same = _same_in_all_layers(file, "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        experts = same.count("num_experts", 1)
        return read_hunyuan_config(
            SparseConfig,
            file,
            num_experts=experts,
            expert_size=same.count("moe_intermediate_size", size),
            routing=Routing(same.at_most("moe_topk", experts, 1), normalize=True),
            shared_size=same.count("num_shared_expert", 1) * size,
        )


def _same_in_all_layers(file: ConfigFile, *names: str) -> ConfigFile:
    """Return these fields, each of which is a value or a list of the value of each layer. Raises ConfigError if layers
    differ."""
    fields = {}
    for name in names:
        value = file.fields.get(name)
        values = value if isinstance(value, list) and value else [value]
        if any(each != values[0] for each in values):
            raise ConfigError(f"{name} in config.json differs between layers, which is not served")
        fields[name] = values[0]
    return ConfigFile(fields)
