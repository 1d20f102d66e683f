"""RecurrentGemma (Botev et al., 2024): Gemma with RG-LRUs in place of attention in two of three layers, and a sliding
window in the others."""

import itertools
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.rg_lru import RgLru
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.selective_scan import ChannelShape

from .gemma3 import set_softcap
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .recurrent_states import StateOrAttention, WithStates, check_length, state_windows

# Neither states nor windows have a limit of length. This is more than any prompt has.
_MOST_TOKENS = 1 << 20
_TRAINED = 8192  # tokens of the longest sequences that published models were trained on
_DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 2560, "intermediate_size": 7680, "num_hidden_layers": 26,
    "num_attention_heads": 10, "attention_window_size": 2048, "hidden_activation": "gelu_pytorch_tanh",
    "block_types": ["recurrent", "recurrent", "attention"], "eos_token_id": 1,
}  # fmt: skip
_KINDS = ("recurrent", "attention")


class RecurrentGemmaConfig(WithStates, LlamaConfig, frozen=True, kw_only=True):
    """logit_softcap: as in Gemma3Config."""

    state_layers: frozenset[int]
    states: ChannelShape | None
    logit_softcap: float

    @property
    def default_model_len(self) -> int:
        return min(_TRAINED, self.max_position_embeddings)


class RecurrentGemmaLayer(StateOrAttention, LlamaLayer):
    blocks = ("temporal_block", "mlp_block")
    norms = ("temporal_pre_norm", "channel_pre_norm")
    state = "temporal_block"

    def make_state(self, config: Any, source: Source, layer: int) -> RgLru:
        return RgLru(source, layer, config.states, config.num_heads, config.hidden_size, config.activation)


class RecurrentGemma(Llama):
    layer = RecurrentGemmaLayer
    final_norm = "final_norm"

    def __init__(self, config: RecurrentGemmaConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        set_softcap(self.head, config.logit_softcap)

    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        # The factor has the precision of bfloat16 in every dtype.
        scale = torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16).item()
        return Embedding(source, config.vocab_size, config.hidden_size, scale=scale)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        layers, heads, hidden = (
            file.count(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        state_layers, window = _state_layers(file, layers), file.count("attention_window_size")
        shape = ChannelShape(
            groups=file.count("num_key_value_heads", heads),
            channels=file.count("lru_width", hidden),
            state=1,
            length=file.count("conv1d_width", 4),
        )
        check_length(shape.length, "conv1d_width")
        if shape.channels % heads:
            raise ConfigError(f"lru_width in config.json is {shape.channels}; it must be a multiple of {heads} heads")
        rope = read_rope(file, _MOST_TOKENS, 0.5)
        if rope.type != "default":
            raise ConfigError(f"rope type {rope.type!r} in config.json is not served for {file.architecture}")
        # In config.json the size is that of gates and ups together.
        llama = {
            "intermediate_size": file.count("intermediate_size") // 2,
            "hidden_act": file.fields["hidden_activation"],
        }
        return read_llama_config(
            RecurrentGemmaConfig,
            ConfigFile({**file.fields, **llama}),
            Defaults(_MOST_TOKENS, tie_word_embeddings=True),
            tuple(recent or window for recent in state_windows(state_layers, layers)),
            rope=rope,
            norm_offset=1.0,
            qkv_bias=file.flag("attention_bias"),
            output_bias=True,
            mlp_bias=True,
            state_layers=state_layers,
            states=shape if state_layers else None,
            logit_softcap=file.number("logits_soft_cap", 30.0),
        )


def _state_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers with an RG-LRU. block_types in config.json are the kinds of the first ones, which repeat."""
    kinds = file.fields["block_types"]
    if not isinstance(kinds, list) or not kinds or any(kind not in _KINDS for kind in kinds):
        raise ConfigError(f"block_types in config.json is {kinds!r}; it must be a list of {' and '.join(_KINDS)}")
    repeated = itertools.islice(itertools.cycle(kinds), layers)
    return frozenset(layer for layer, kind in enumerate(repeated) if kind == "recurrent")
