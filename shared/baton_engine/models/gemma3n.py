"""Gemma 3n, text only (Gemma Team, 2025): hidden states in several versions of which each layer computes one, a second
path of low rank beside attention, sparse hidden units, and layers with inputs of their own and shared KV."""

from typing import Any

import torch
from torch.nn import functional

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import WideRmsNorm
from baton_engine.layers.rope import rotary_tables
from baton_engine.shard import Columns, Ranks, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .decoder import Decoder
from .gemma3 import read_gemma_config, read_softcap, set_softcap
from .layer_inputs import InputGate, LayerInputs
from .shared_kv import SharedKvConfig, attention_of
from .sliding_windows import ropes_by_window

# Square means below this one count as this one where the magnitude of hidden states is changed.
_LEAST_SQUARE = 1e-5


class Gemma3nConfig(SharedKvConfig, frozen=True, kw_only=True):
    """mlp_sizes: hidden units of each layer. sparsities: the fraction of each layer's hidden units that are 0.
    versions: of the hidden states. active: the one that layers compute. scales_active: layers scale what they show to
    the gate of their own input. rank: of the path beside attention."""

    mlp_sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    versions: int
    active: int
    scales_active: bool
    rank: int

    @property
    def layer_weights(self) -> int:
        rest = 3 * self.mlp_units + 2 * self.rank + 2 * self.input_size
        return self.attention_weights + round(self.hidden_size * rest)

    def layer_weights_read(self, tokens: float) -> float:
        return self.layer_weights

    @property
    def mlp_units(self) -> float:
        return sum(self.mlp_sizes) / self.num_layers


class _SparseMlp:
    """A gated MLP in which only those hidden units count whose gates are far above the mean (Li et al., "The Lazy
    Neuron Phenomenon", 2022)."""

    def __init__(
        self, gate_up: Linear, down: Linear, size: int, sparsity: float, activation: str, ranks: Ranks
    ) -> None:
        """size: hidden units of all ranks. sparsity: the fraction that would be 0 if gates had a normal
        distribution."""
        self._gate_up, self._down, self._size, self._ranks = gate_up, down, size, ranks
        self._activation = ACTIVATIONS[activation]
        self._deviations = float(torch.special.ndtri(torch.tensor(sparsity)))
        self.inputs = gate_up.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=1)
        wide = gate.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square()).sqrt()
        above = functional.relu(wide - (mean + deviation * self._deviations)).to(gate.dtype)
        return self._down(self._activation(above).mul_(up))

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of the values [T, units] of all ranks, [T, 1] float32."""
        return self._ranks.sum(values.sum(dim=1, keepdim=True)).div_(self._size)


class _Versions:
    """Predicts all versions of the hidden states from those before a layer, and corrects them by the one that the layer
    has computed (Baykal et al., "Alternating Updates for Efficient Transformers", 2023)."""

    def __init__(self, config: Gemma3nConfig, source: Source) -> None:
        hidden, self._count, self._active = config.hidden_size, config.versions, config.active
        self._scale = 1.0 / hidden
        self._norm = WideRmsNorm(source.at("router_norm"), hidden, config.rms_norm_eps)
        self._router = Linear(source, ["modality_router"], [self._count], hidden, sensitive=True)
        self._predict = Linear(source, ["prediction_coefs"], [self._count**2], self._count, sensitive=True)
        self._correct = Linear(source, ["correction_coefs"], [self._count], self._count, sensitive=True)
        self._output_scale = source.take("correct_output_scale", (hidden,)) if config.scales_active else None

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, versions, hidden]. Returns a new tensor of its shape."""
        factors = self._predict(self._routed(x[:, self._active])).view(-1, self._count, self._count)
        return torch.baddbmm(x, factors, x)

    def corrected(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """predicted: [T, versions, hidden], which is overwritten. computed: [T, hidden]. Returns [T, versions,
        hidden]."""
        factors = self._correct(self._routed(computed)).add_(1.0)
        return predicted.add_((computed - predicted[:, self._active])[:, None] * factors[:, :, None])

    def shown(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the gate of a layer's own input sees of x [T, versions, hidden]."""
        active = x[:, self._active]
        return active.contiguous() if self._output_scale is None else active * self._output_scale

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x.contiguous()).mul_(self._scale)
        return torch.tanh(self._router(normed).float()).to(x.dtype)


class _Gemma3nLayer:
    def __init__(
        self, config: Gemma3nConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, eps, ranks = config.hidden_size, config.mlp_sizes[layer], config.rms_norm_eps, source.ranks
        self._active = config.active
        self.versions = _Versions(config, source.at("altup"))
        beside = source.at("laurel")
        self.left = Linear(beside, ["linear_left"], [config.rank], hidden)
        self.right = Linear(beside, ["linear_right"], [hidden], config.rank)
        self.beside_norm = WideRmsNorm(beside.at("post_laurel_norm"), hidden, eps)
        self.attention = attention_of(config, source, layer, rotary)
        mlp = source.at("mlp")
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=Columns(ranks))
        down = Linear(mlp, ["down_proj"], [hidden], inner, shard=Rows(ranks))
        sparsity = config.sparsities[layer]
        self.mlp = (
            _SparseMlp(gate_up, down, inner, sparsity, config.activation, ranks)
            if sparsity
            else GatedMlp(gate_up, down, config.activation)
        )
        self.input_norm = WideRmsNorm(source.at("input_layernorm"), hidden, eps)
        self.post_attention_norm = WideRmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.pre_mlp_norm = WideRmsNorm(source.at("pre_feedforward_layernorm"), hidden, eps).before(self.mlp)
        self.post_mlp_norm = WideRmsNorm(source.at("post_feedforward_layernorm"), hidden, eps)
        self.input_gate = InputGate(source, config.input_size, hidden, eps, config.activation)

    def __call__(self, x: torch.Tensor, ctx: Context, given: torch.Tensor) -> torch.Tensor:
        """x: [T, versions, hidden]. given: this layer's own input, [T, size]. Returns [T, versions, hidden]."""
        predicted = self.versions.predicted(x)
        active = predicted[:, self._active].contiguous()
        normed = self.input_norm(active)
        beside = normed + self.beside_norm(self.right(self.left(normed)))
        attended = self.post_attention_norm(self.attention(normed, ctx)).add_(active).add_(beside).mul_(0.5**0.5)
        computed = self.post_mlp_norm(self.mlp(self.pre_mlp_norm(attended))).add_(attended)
        x = self.versions.corrected(predicted, computed)
        added = self.input_gate(self.versions.shown(x), given)
        x[:, 1:] += added[:, None]
        return x


class Gemma3n(Decoder):
    def __init__(self, config: Gemma3nConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        config.check_stages(source)
        inside, source = self.parts(source)
        hidden, layers, eps = config.hidden_size, config.num_layers, config.rms_norm_eps
        full, window = (
            rotary_tables(rope, config.head_dim, max_positions, source.device)
            for rope in (config.rope, config.window_rope)
        )
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden, scale=hidden**0.5)
        self.layer_inputs = LayerInputs(inside, layers, config.input_size, config.input_vocab, hidden, eps)
        self.first, self.last = (
            [Linear(inside, [f"{name}.{version}"], [hidden], hidden) for version in range(config.versions - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )
        self.layers = [
            _Gemma3nLayer(
                config, inside.at(f"layers.{layer}"), layer, full if config.attention[layer].window is None else window
            )
            for layer in range(layers)
        ]
        self.norm = WideRmsNorm(inside.at("norm"), hidden, eps)
        self.head = self.make_head(config, source)
        set_softcap(self.head, config.logit_softcap)

    def __call__(self, ctx: Context) -> torch.Tensor:
        embedded = self.begin(ctx)
        given = self.layer_inputs(ctx.ids, embedded)
        x = torch.stack([embedded, *(_as_large_as(embedded, project(embedded)) for project in self.first)], dim=1)
        for layer, own in zip(self.layers, given, strict=True):
            x = layer(x, ctx, own)
        first, *others = (version.contiguous() for version in x.unbind(dim=1))
        ends = [_as_large_as(first, project(other)) for project, other in zip(self.last, others, strict=True)]
        normed: torch.Tensor = self.norm(torch.stack([first, *ends]).mean(dim=0))
        return normed

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma3nConfig:
        layers, context = file.count("num_hidden_layers", 35), file.count("max_position_embeddings", 32768)
        types = file.layer_types("layer_types", layers) or [
            "sliding_attention" if (layer + 1) % 5 else "full_attention" for layer in range(layers)
        ]
        window, versions = file.count("sliding_window", 512), file.count("altup_num_inputs", 4)
        rope, window_rope = ropes_by_window(
            file, context, file.number("rope_theta", 1e6), file.number("rope_local_base_freq", 1e4)
        )
        sizes = _of_each_layer(file, "intermediate_size", layers, [16384] * layers, 1)
        sparse = 10 if layers > 10 else 0
        sparsities = _of_each_layer(
            file, "activation_sparsity_pattern", layers, [0.95] * sparse + [0.0] * (layers - sparse), 0
        )
        if max(sparsities) >= 1:
            raise ConfigError("activation_sparsity_pattern in config.json must be below 1")
        active = file.integer("altup_active_idx", 0)
        if active >= versions:
            raise ConfigError(f"altup_active_idx is {active}, but altup_num_inputs is {versions}")
        return read_gemma_config(
            Gemma3nConfig,
            ConfigFile({"hidden_size": 2048, "num_key_value_heads": 2, **file.fields, "intermediate_size": max(sizes)}),
            context,
            vocab_size=file.count("vocab_size", 262400),
            attention=tuple(
                AttentionSpec(scale=1.0, window=window if kind == "sliding_attention" else None) for kind in types
            ),
            rope=rope,
            window_rope=window_rope,
            qk_norm=True,
            shared_layers=file.integer("num_kv_shared_layers", 15),
            logit_softcap=read_softcap(file, "final_logit_softcapping", 30.0),
            input_size=file.count("hidden_size_per_layer_input", 256),
            input_vocab=file.count("vocab_size_per_layer_input", 262144),
            mlp_sizes=tuple(sizes),
            sparsities=tuple(sparsities),
            versions=versions,
            active=active,
            scales_active=file.flag("altup_correct_scale", True),
            rank=file.count("laurel_rank", 64),
        )


def _as_large_as(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return y [T, hidden], scaled such that each row has the mean square of x's."""
    wanted, has = (values.float().square().mean(dim=1, keepdim=True) for values in (x, y))
    return y * (wanted.sqrt() / has.clamp(min=_LEAST_SQUARE).sqrt()).to(y.dtype)


def _of_each_layer(file: ConfigFile, name: str, layers: int, default: list[Any], least: int) -> list[Any]:
    """Return a field with a number for each layer, or with one for all."""
    given = default if file.fields.get(name) is None else file.fields[name]
    each = given if isinstance(given, list) else [given] * layers
    valid = all(isinstance(value, int | float) and not isinstance(value, bool) and value >= least for value in each)
    if len(each) != layers or not valid:
        raise ConfigError(f"{name} in config.json is {given!r}; it must have a number for each of {layers} layers")
    return each
