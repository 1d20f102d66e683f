"""Mamba (Gu and Dao, 2023) and FalconMamba (TII, 2024): a norm and Mamba 1 in each layer, and no attention."""

from collections.abc import Sequence

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.mamba1 import Mamba1, Mamba1Fields, Norm
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.source import Source
from baton_kernels.reference.selective_scan import ChannelShape

from .block_layer import BlockLayer
from .llama import Llama, LlamaConfig
from .recurrent_states import Mamba1Names, read_mamba1
from .states_only import StatesOnlyConfig, groups_of, read_states_only

_NAMES = Mamba1Names("state_size", "conv_kernel", "time_step_rank", "use_bias", "use_conv_bias")
_SIZES = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32}


class MambaConfig(StatesOnlyConfig, frozen=True, kw_only=True):
    """mixer_eps: of the norms inside Mamba; None = there are none."""

    states: ChannelShape
    mamba: Mamba1Fields
    mixer_eps: float | None

    @property
    def projections(self) -> list[tuple[int, int]]:
        """As in ModelConfig, those from the channels and back to their rates."""
        rank, inner = self.mamba.rank, self.intermediate_size
        return [(rank + 2 * self.states.state, inner), (inner, rank)]


class MambaLayer(BlockLayer):
    def __init__(
        self, config: MambaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        shape, how, hidden = config.states, config.mamba, config.hidden_size
        mixer = Mamba1(source.at("mixer"), layer, shape, how, hidden, _norms(config, source))
        norm = RmsNorm(source.at("norm"), hidden, config.rms_norm_eps).before(mixer)
        self.parts = [(norm, mixer, True)]


class Mamba(Llama):
    layer = MambaLayer
    embedding_name = "embeddings"
    final_norm = "norm_f"
    trained = 2048

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("backbone"), source

    @classmethod
    def mixer_eps(cls, file: ConfigFile) -> float | None:
        return None

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_SIZES)
        # FalconMamba 7B has an expand of 16, which its intermediate_size overrides.
        inner = file.count("intermediate_size", file.count("expand", 2) * file.count("hidden_size"))
        shape, fields = read_mamba1(file, _NAMES, groups_of(inner), inner)
        return read_states_only(
            MambaConfig, file, shape, inner, tied=True, mamba=fields, trained=cls.trained,
            mixer_eps=cls.mixer_eps(file),
        )  # fmt: skip


class FalconMamba(Mamba):
    trained = 8192

    @classmethod
    def mixer_eps(cls, file: ConfigFile) -> float | None:
        return file.number("mixer_rms_eps", 1e-6)


def _norms(config: MambaConfig, source: Source) -> Sequence[Norm]:
    """Return the norms of a layer as Mamba1 takes them. FalconMamba's have no weights."""
    if config.mixer_eps is None:
        # The products and the scan need rows apart from those of the other vectors.
        return [torch.Tensor.contiguous] * 3
    sizes = (config.mamba.rank, config.states.state, config.states.state)
    return [UnitNorm(source, size, config.mixer_eps) for size in sizes]
