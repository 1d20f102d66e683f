"""Kolibri 1 (Aleph Alpha, 2026): norms around each block and of each head, rotation where a layer has a window, and
experts chosen by logits, whose sigmoids are their weights."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .exaone4 import RotatesInWindows
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .normed_around import NormedAround
from .sliding_windows import windows_in_turn
from .sparse_config import SparseConfig, read_experts_per_token

# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 128000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48,
    "moe_intermediate_size": 512,
}  # fmt: skip


class Kolibri1Config(RotatesInWindows, SparseConfig, frozen=True, kw_only=True):
    pass


class Kolibri1Layer(NormedAround, DeepseekExpertsLayer):
    post_norms = ("post_attn_norm", "post_ffn_norm")

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        # It is the only tensor of experts that does not have the name of the MLP.
        self._correction = source.take("moe.router.expert_bias", (config.num_experts,), dtype=torch.float32)
        return super().make_mlp(config, source, layer)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return self._correction


class Kolibri1(Llama):
    layer = Kolibri1Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        if file.fields.get("sliding_window", 0) is None:
            raise ConfigError("sliding_window in config.json is null; layers with a window need an integer")
        file = file.with_defaults(_DEFAULTS)
        layers, size = file.count("num_hidden_layers"), file.count("moe_intermediate_size")
        # transformers writes the latter name.
        experts = file.count("num_experts", file.count("num_local_experts", 384))
        return read_llama_config(
            Kolibri1Config,
            # All layers have experts, so no MLP has a size of its own.
            ConfigFile({**file.fields, "intermediate_size": size}),
            Defaults(262144, num_kv_heads=4, head_dim=128),
            windows_in_turn(file, layers, 5, 513),
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=Routing(
                read_experts_per_token(file, experts, 6), sigmoid=True, normalize=file.flag("norm_topk_prob"),
                corrects_logits=True,
            ),
            shared_size=file.integer("shared_expert_intermediate_size", 512),
        )  # fmt: skip
