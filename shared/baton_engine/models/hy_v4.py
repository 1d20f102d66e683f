"""Hy4 (Tencent, 2026): DeepSeek-V3.2's attention with sinks and gates, experts with limited gates, and several residual
streams."""

from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.embedding import Embedding, Head, float32_head
from baton_engine.layers.experts import load_joined_experts
from baton_engine.layers.gated_latents import ElementGatedLatents
from baton_engine.layers.hyper_connections import HyperConnection, Mixing, StreamHead
from baton_engine.layers.indexer import Indexer
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import rotary_tables
from baton_engine.source import Source
from baton_kernels.reference.activation import LimitedGate

from .deepseek_v2 import DeepseekConfig
from .deepseek_v32 import IndexedConfig, IndexedLayer, has_indexer, read_indexed_config
from .glm_moe_dsa import selecting_layers
from .llama import SILU, LlamaConfig
from .sparse_config import SparseConfig
from .streams import StreamDecoder, WithStreams, pass_streams

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 120832, "hidden_size": 2816, "intermediate_size": 6912, "num_hidden_layers": 34,
    "num_attention_heads": 32, "max_position_embeddings": 262144, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 768, "q_lora_rank": 1536, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
}  # fmt: skip
# The values with which transformers computes every model of the family.
_GIVEN: dict[str, Any] = {
    "enable_ihc": True, "enable_lm_head_fp32": True, "gated_mla": True, "gating_type": "elementwise",
    "learnable_sink": True,
}  # fmt: skip
_KINDS = ("indexed_attention", "deepseek_sparse_attention")  # both are names of the same


class HyV4Config(WithStreams, IndexedConfig, frozen=True, kw_only=True):
    """mixing: of the residual streams. limit: of the gates of experts."""

    mixing: Mixing
    limit: float

    @property
    def projections(self) -> list[tuple[int, int]]:
        gates = self.num_heads * self.latent.value_dim, self.hidden_size
        connection = 2 * self.mixing.streams, self.stream_size
        return [*super().projections, gates, connection, connection]


class HyV4Layer(IndexedLayer):
    attention_class = ElementGatedLatents

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        assert isinstance(config, HyV4Config)
        mlp = self.block(source, 1)
        dense = mlp if layer in config.dense_layers else mlp.at(self.shared)
        # transformers writes the gates of MLPs by the name that the checkpoints have for those of attention.
        self.gates = ("linear_gate" if "linear_gate.weight" in dense else "gate_proj", "up_proj")
        super().__init__(config, source, layer, rotary)
        self.around_attention, self.around_mlp = (
            HyperConnection(source, _stream_names(source, name, "hc_", "hc_pre."), config.hidden_size, config.mixing)
            for name in ("hc_attn_layer", "hc_mlp_layer")
        )

    def make_indexer(
        self, config: DeepseekConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> Indexer | None:
        assert isinstance(config, HyV4Config)
        if not has_indexer(config, source, layer):
            return None
        assert config.low_rank is not None
        return Indexer(
            source.at("indexer"), layer, config.latent, hidden=config.hidden_size, low_rank=config.low_rank,
            rotary=rotary, interleaved=config.index_interleaved, eps=config.rms_norm_eps, rotates_end=True,
        )  # fmt: skip

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        assert isinstance(config, HyV4Config)
        form = JoinedForm(activation=LimitedGate(config.limit, before=True))
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)

    def __call__(self, streams: torch.Tensor, ctx: Context) -> torch.Tensor:  # type: ignore[override]
        """streams: as in HyperConnection. Returns them after this layer."""
        return pass_streams(self, streams, ctx)


class HyV4(StreamDecoder):
    def __init__(self, config: HyV4Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside, source = self.parts(source)
        hidden, self.streams = config.hidden_size, config.mixing.streams
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden)
        rotary = rotary_tables(config.rope, config.rotary_dim, max_positions, source.device)
        self.layers = [
            HyV4Layer(config, inside.at(f"layers.{layer}"), layer, rotary)
            for layer in source.stage.layers(config.num_layers)
        ]
        names = _stream_names(inside, "hc_head", "hc_head_")
        self.stream_head = StreamHead(inside, names, hidden, config.mixing)
        self.norm = RmsNorm(inside.at("norm"), hidden, config.rms_norm_eps)
        self.head = self.make_head(config, source)

    def make_head(self, config: HyV4Config, source: Source) -> Head:
        tied = config.tie_word_embeddings
        return super().make_head(config, source) if tied else float32_head(source, self.embedding)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        file.choice("hidden_act", "silu", tuple(SILU))
        layers = file.count("num_hidden_layers", _DEFAULTS["num_hidden_layers"])
        file.layer_types("layer_types", layers, _KINDS)
        file = file.with_defaults(
            {
                **_DEFAULTS,
                "mlp_layer_types": ["dense", *("sparse",) * (layers - 1)],
                "indexer_types": ["shared" if layer and (layer - 1) % 4 else "full" for layer in range(layers)],
            }
        )
        limit = file.number("swiglu_limit", 10.0)
        if not limit > 0:
            raise ConfigError(f"swiglu_limit in config.json is {limit}; it must be above 0")
        # In the authors' engines the two elements of each rotated pair are side by side, and in transformers they never
        # are. Only the authors' own configs say that attention has gates.
        interleaved = file.flag("rope_interleave", "gated_mla" in file.fields)
        config = read_indexed_config(
            file, _DEFAULTS, index_heads=16, index_interleaved=interleaved, selecting=selecting_layers(file),
            interleaved=interleaved,
        )  # fmt: skip
        spec = msgspec.structs.replace(config.latent, sinks=True)
        mixing = Mixing(
            file.count("hc_mult", 4), config.rms_norm_eps, file.number("hc_eps", 1e-6), file.number("hc_magnitude", 2.0)
        )
        changed = {"latent": spec, "attention": (spec,) * layers}
        return HyV4Config(**{**msgspec.structs.asdict(config), **changed}, mixing=mixing, limit=limit)


def _stream_names(source: Source, place: str, part: str, within: str = "") -> str:
    """Return the beginning of the names of StreamGates' tensors at a place: that of the authors, or of transformers.

    within: what the authors have after the place. transformers has it before the place, also where they lack it.
    """
    written = f"hc_pre.{place}.{part}"
    return written if f"{written}fn" in source else f"{place}.{within}{part}"
