"""Mamba 2 (Dao and Gu, 2024), as in Codestral Mamba: a norm and a block of Mamba 2 in each layer, and no attention."""

from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.recurrence import Mamba
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .block_layer import BlockLayer
from .llama import Llama, LlamaConfig
from .recurrent_states import mamba, read_mamba
from .states_only import StatesOnlyConfig, groups_of, read_states_only

_SIZES = {"vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64}
# The names of fields of Mamba that other families have, and those of this family with their defaults.
_NAMES = {
    "mamba_n_heads": ("num_heads", 128), "mamba_d_head": ("head_dim", 64), "mamba_n_groups": ("n_groups", 8),
    "mamba_d_state": ("state_size", 128), "mamba_d_conv": ("conv_kernel", 4), "mamba_expand": ("expand", 2),
}  # fmt: skip
_TRAINED = 4096  # tokens, as no published config.json says


class Mamba2Config(StatesOnlyConfig, frozen=True, kw_only=True):
    states: StateShape
    mamba: Mamba

    @property
    def projections(self) -> list[tuple[int, int]]:
        """As in ModelConfig, those to keys, queries and rates."""
        return [(2 * self.mamba.groups * self.states.key_dim + self.states.value_heads, self.hidden_size)]


class Mamba2Layer(BlockLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        mixer = mamba(config, source.at("mixer"), layer)
        norm = RmsNorm(source.at("norm"), config.hidden_size, config.rms_norm_eps).before(mixer)
        self.parts = [(norm, mixer, True)]


class Mamba2(Llama):
    layer = Mamba2Layer
    embedding_name = "embeddings"
    final_norm = "norm_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("backbone"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_SIZES)
        inner = file.count("expand", 2) * file.count("hidden_size")
        fields: dict[str, Any] = {ours: file.count(*own) for ours, own in _NAMES.items()}
        fields |= {"mamba_proj_bias": file.flag("use_bias"), "mamba_conv_bias": file.flag("use_conv_bias", True)}
        shape, how = read_mamba(ConfigFile({**file.fields, **fields}), groups_of(fields["mamba_n_heads"]), inner)
        return read_states_only(Mamba2Config, file, shape, inner, tied=False, mamba=how, trained=_TRAINED)
