"""Mamba (Gu and Dao, 2023) and FalconMamba (TII, 2024): a norm and Mamba 1 in each layer, and no attention."""

import math
from collections.abc import Sequence
from typing import Self

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.mamba1 import Mamba1, Mamba1Fields, Norm
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.layers.rope import Rope
from baton_engine.shard import Place, even_part
from baton_engine.source import Source
from baton_kernels.reference.selective_scan import ChannelShape

from .block_layer import BlockLayer
from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config
from .recurrent_states import Mamba1Names, WithStates, read_mamba1, state_windows
from .unrotated import NO_ROPE

_NAMES = Mamba1Names("state_size", "conv_kernel", "time_step_rank", "use_bias", "use_conv_bias")
_SIZES = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32}
# There are no key-value heads, but the cache and ranks divide states as if there were, at most so many.
_MOST_GROUPS = 8
# In 16 bits, a group's states take this many rows of a block, and so a block has about as many tokens. With fewer
# tokens there would be more states, with more tokens a known prefix would be found in longer steps.
_ROWS = 256
# States have no limit of length. This is more than any prompt has.
_MOST_TOKENS = 1 << 20


class MambaConfig(WithStates, LlamaConfig, frozen=True, kw_only=True):
    """intermediate_size: channels. Around them a layer has the weights that a gated MLP with as many hidden units has.

    trained: tokens of the longest sequences that the model was trained on. mixer_eps: of the norms inside Mamba; None =
    there are none.
    """

    state_layers: frozenset[int]
    states: ChannelShape
    mamba: Mamba1Fields
    trained: int
    mixer_eps: float | None

    @property
    def default_model_len(self) -> int:
        return min(self.trained, self.max_position_embeddings)

    @property
    def value_dim(self) -> int:
        """As in ModelConfig: the inputs of a group's channels take as many rows of a block as its states."""
        return max(self.head_dim * self.states.recent // self.states.state // 2 * 2, 2)

    @property
    def projections(self) -> list[tuple[int, int]]:
        """As in ModelConfig, those from the channels and back to their rates."""
        rank, inner = self.mamba.rank, self.intermediate_size
        return [(rank + 2 * self.states.state, inner), (inner, rank)]

    def rope_of(self, layer: int) -> Rope | None:
        return None

    def part(self, ranks: Place) -> Self:
        even_part(self.num_kv_heads, ranks, "groups of Mamba's channels")  # there are no heads to name in an error
        return super().part(ranks)


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
        layers = file.count("num_hidden_layers")
        # FalconMamba 7B has an expand of 16, which its intermediate_size overrides.
        inner = file.count("intermediate_size", file.count("expand", 2) * file.count("hidden_size"))
        groups = math.gcd(inner, _MOST_GROUPS)
        shape, fields = read_mamba1(file, _NAMES, groups, inner)
        heads = {"num_attention_heads": groups, "num_key_value_heads": groups, "intermediate_size": inner}
        heads["head_dim"] = max(shape.plane_elements[0] * 4 // (2 * _ROWS) // 2 * 2, 2)
        return read_llama_config(
            MambaConfig,
            ConfigFile({**file.fields, **heads}),
            Defaults(_MOST_TOKENS, tie_word_embeddings=True),
            state_windows(frozenset(range(layers)), layers),
            rope=NO_ROPE,
            eps=file.number("layer_norm_epsilon", 1e-5),
            activations=SILU,
            state_layers=frozenset(range(layers)),
            states=shape,
            mamba=fields,
            trained=cls.trained,
            mixer_eps=cls.mixer_eps(file),
        )


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
