"""The text part of Mistral Large 4 (Mistral AI, 2026): latent attention over selected tokens, with factors of queries
and periods of the rotation that are learned, in layers some of which do not rotate."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import ExpertNames
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.rope import Rope, inverse_frequencies, rope_fields
from baton_engine.layers.scaled_latents import ScaledIndexer, ScaledLatentAttention
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source

from .deepseek_v2 import read_deepseek_config
from .deepseek_v32 import IndexedConfig, has_indexer, indexed_spec
from .gemma3 import read_softcap, set_softcap
from .glm_moe_dsa import selecting_layers
from .llama import Layer, Llama, LlamaConfig, LlamaLayer, RotaryTables
from .smollm3 import read_rotating
from .sparse_config import read_layers_without_experts
from .text_part import text_fields

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 72,
    "num_attention_heads": 64, "max_position_embeddings": 1048576, "n_routed_experts": 128, "n_shared_experts": 1,
    "moe_intermediate_size": 6144, "qk_nope_head_dim": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}  # fmt: skip
_EXPERT = ExpertNames(gate="w1", up="w3", down="w2")


class MistralLarge4Config(IndexedConfig, frozen=True, kw_only=True):
    """rotating: whether each layer rotates a part of its keys. sources: for each layer, the one whose latents it reads.
    softcap: of logits; 0 = none."""

    rotating: tuple[bool, ...]
    sources: tuple[int, ...]
    softcap: float

    @property
    def query_shapes(self) -> tuple[tuple[int, int], ...]:
        # Layers that do not rotate have more elements that latents make.
        spec = self.latent
        unrotated = () if all(self.rotating) else ((self.num_heads, spec.query_dim + spec.rope_dim),)
        return (self.num_heads, spec.query_dim), *unrotated

    def fingerprint_facts(self) -> dict[str, Any]:
        facts = {**super().fingerprint_facts(), "rotating": list(self.rotating)}
        return facts if self.sources == tuple(range(self.num_layers)) else {**facts, "sources": list(self.sources)}


class MistralLarge4Layer(LlamaLayer):
    blocks = ("attention", "feed_forward")
    norms = ("attention_norm", "ffn_norm")
    gates = ("w1", "w3")
    down = "w2"

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, MistralLarge4Config)
        assert rotary is not None
        hidden, rotates, reads = config.hidden_size, config.rotating[layer], config.sources[layer]
        if reads < source.stage.layers(config.num_layers).start:
            raise ConfigError(
                f"--pipeline-parallel divides the layers of this model between layers {reads} and {layer}, which share "
                "latents: use another number of stages, or --tensor-parallel"
            )
        indexer = None
        if has_indexer(config, source, layer):
            # Tables without columns rotate nothing.
            cos, sin = rotary if rotates else (table[:, :0].contiguous() for table in rotary)
            indexer = ScaledIndexer(
                source.at("indexer"), layer, config.latent, hidden=hidden, rotary=(cos, sin), interleaved=True
            )
        return ScaledLatentAttention(
            source, layer, config.latent, hidden=hidden, heads=config.num_heads, eps=config.rms_norm_eps,
            bias=config.qkv_bias, rotary=rotary, rotates=rotates, reads=reads, indexer=indexer,
        )  # fmt: skip

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MistralLarge4Config)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        count, hidden, size, ranks = config.num_experts, config.hidden_size, config.shared_size, source.ranks
        names, shared = _EXPERT.gated(config.activation), source.at("shared_experts")
        router = Router(source.at("gate"), config.routing, count, hidden)
        held = load_experts(source.at("experts"), names, count, hidden, config.expert_size)
        experts = ExpertMlp(router, held, ranks)
        if not size:
            return experts
        gate_up = Linear(shared, ["w1", "w3"], [size, size], hidden, shard=Columns(ranks))
        down = Linear(shared, ["w2"], [hidden], size, shard=Rows(ranks, joins=False))
        return WithSharedExpert(experts, GatedMlp(gate_up, down, config.activation), ranks)


class MistralLarge4(Llama):
    """The checkpoint has the names of Mistral AI's own format."""

    layer = MistralLarge4Layer
    embedding_name = "tok_embeddings"
    head_name = "output"

    def __init__(self, config: MistralLarge4Config, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        set_softcap(self.head, config.softcap)

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source, source

    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        tables = rotary[config.rope]
        assert tables is not None
        alpha = source.take("lerope.alpha", (config.rotary_dim // 2,), dtype=torch.float32)
        learned = _learned_tables(config.rope, alpha, len(tables[0]))
        return super().make_layers(config, source, {config.rope: learned})

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = text_fields(file).with_defaults(_DEFAULTS)
        layers = file.count("num_hidden_layers")
        # All queries are computed from hidden states.
        fields = {**file.fields, "q_lora_rank": None, "rope_parameters": rope_fields(file) or _ROPE}
        config = read_deepseek_config(
            ConfigFile({**fields, "rope_scaling": None}), _DEFAULTS, chosen=4, normalize=True, group_best=2,
            dense_layers=read_layers_without_experts(file, layers, 1),
        )  # fmt: skip
        spec = indexed_spec(file, config.latent, index_heads=32)
        rotating = read_rotating(file, layers)
        return MistralLarge4Config(
            **{**msgspec.structs.asdict(config), "latent": spec, "attention": (spec,) * layers},
            selecting=selecting_layers(file),
            index_interleaved=True,
            rotating=rotating,
            sources=_read_sources(file, rotating),
            softcap=read_softcap(file, "final_logit_softcapping", 30.0),
        )


def _read_sources(file: ConfigFile, rotating: tuple[bool, ...]) -> tuple[int, ...]:
    """Return for each layer the one whose latents it reads."""
    layers = len(rotating)
    if file.fields.get("kv_source_layers") is None:
        return tuple(range(layers))
    sources = file.integers("kv_source_layers")
    read = {at for layer, at in enumerate(sources) if at != layer}

    def is_served(layer: int, at: int) -> bool:
        # transformers keeps the last latents of each kind that a later layer reads.
        kept = [each for each in read if each < layer and rotating[each] == rotating[layer]]
        return at == layer or (at == max(kept, default=-1) and sources[at] == at)

    if len(sources) != layers or not all(map(is_served, range(layers), sources)):
        raise ConfigError(
            f"kv_source_layers in config.json must name for each of the {layers} layers itself, or the last layer "
            "before it that names itself, rotates alike and is named by others"
        )
    return tuple(sources)


def _learned_tables(rope: Rope, alpha: torch.Tensor, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what rotary_tables does for a rotation whose frequencies are multiplied by exp(alpha). alpha: [pairs]."""
    frequencies = inverse_frequencies(rope, 2 * len(alpha)).to(alpha.device) * alpha.exp()
    angles = torch.arange(max_positions, dtype=torch.float32, device=alpha.device).unsqueeze(1) * frequencies
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
