"""Step 3.5 Flash and the text part of Step 3.7 Flash (StepFun, 2026): Laguna's numbers of heads by layer with sigmoid
gates, the experts of a layer in one tensor, and limits of gates in some layers."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp, LimitedMlp
from baton_engine.layers.rope import Rope
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import LimitedGate
from baton_kernels.reference.routing import Routing

from .laguna import LagunaConfig, LagunaLayer
from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import partial_rope
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_without_experts

_CONTEXT = 128000
# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
    "num_attention_heads": 64,
}  # fmt: skip
# The names of the authors' own configs, and those of transformers.
_NAMES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim", "num_mtp_layers": "num_nextn_predict_layers",
}  # fmt: skip
# The values with which transformers computes every model of the family.
_GIVEN: dict[str, Any] = {
    "att_impl_type": "GQA", "moe_router_activation": "sigmoid", "norm_expert_weight": True,
    "use_bidirectional_attention": False, "use_head_wise_attn_gate": True, "use_moe_router_bias": True,
    "yarn_only_types": ["full_attention"],
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")


class Step3p5Config(LagunaConfig, frozen=True, kw_only=True):
    """limits, shared_limits: of the gates of each layer's experts, and of its other MLPs; 0 = none."""

    limits: tuple[float, ...]
    shared_limits: tuple[float, ...]


class Step3p5Layer(LagunaLayer):
    gate_activation = staticmethod(torch.sigmoid)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Step3p5Config)
        limit, hidden = config.shared_limits[layer], config.hidden_size
        if layer in config.dense_layers:
            return self.mlp_of(config, source.at("mlp"), config.intermediate_size, limit, Rows(source.ranks))
        shared = source.at("share_expert")
        source, count, size = source.at("moe"), config.num_experts, config.expert_size
        router = Router(source.at("gate"), config.routing, count, hidden, correction=self.correction(config, source))
        activation = LimitedGate(config.limits[layer]) if config.limits[layer] else "silu"
        form = JoinedForm(
            "gate_proj.weight", "down_proj.weight", up="up_proj.weight", activation=activation, apart="experts"
        )
        experts = ExpertMlp(router, load_joined_experts(source, count, hidden, size, form), source.ranks)
        mlp = self.mlp_of(config, shared, config.shared_size, limit, Rows(source.ranks, joins=False))
        return WithSharedExpert(experts, mlp, source.ranks)

    def mlp_of(self, config: LlamaConfig, source: Source, size: int, limit: float, rows: Rows) -> GatedMlp | LimitedMlp:
        """Return an MLP. size: its hidden units. limit: of its gates, 0 = none. rows: how its output is divided."""
        hidden, bias, names = config.hidden_size, config.mlp_bias, ["gate_proj", "up_proj"]
        gate_up = Linear(source, names, [size, size], hidden, bias=bias, shard=Columns(source.ranks))
        down = Linear(source, ["down_proj"], [hidden], size, bias=bias, shard=rows)
        return LimitedMlp(gate_up, down, LimitedGate(limit)) if limit else GatedMlp(gate_up, down, config.activation)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("router_bias", (config.num_experts,), dtype=torch.float32)


class Step3p5(Llama):
    layer = Step3p5Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        renamed = {ours: file.fields[name] for name, ours in _NAMES.items() if file.fields.get(name) is not None}
        file = file.with_defaults(renamed).with_defaults(_DEFAULTS)
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        layers, experts = file.count("num_hidden_layers"), file.count("n_routed_experts", 288)
        # Lists may have entries for the layers that predict further tokens, too.
        both = layers + file.integer("num_nextn_predict_layers", 0)
        lists = {name: value for name, value in file.fields.items() if isinstance(value, list) and len(value) == both}
        file = ConfigFile({**file.fields, **{name: value[:layers] for name, value in lists.items()}})
        kinds = file.layer_types("layer_types", layers) or [_KINDS[0]] * layers
        window = file.count("sliding_window") if _KINDS[1] in kinds else None
        heads, dim, bias = _heads(file, kinds), file.count("head_dim", 128), file.flag("attention_bias")
        rope, window_rope = (_rope(file, kinds, kind) for kind in _KINDS)
        config = read_llama_config(
            Step3p5Config,
            ConfigFile({**file.fields, "num_attention_heads": max(heads), "head_dim": dim}),
            Defaults(_CONTEXT, num_kv_heads=8, rms_norm_eps=1e-5),
            tuple(window if kind == _KINDS[1] else None for kind in kinds),
            activations=SILU,
            scale=file.number("query_pre_attn_scalar", dim) ** -0.5,
            rope=rope,
            window_rope=window_rope,
            norm_offset=1.0,
            heads=heads,
            gates_of_head=1,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 1280),
            routing=Routing(
                read_experts_per_token(file, experts, 8), sigmoid=True, normalize=True,
                scale=file.number("moe_router_scaling_factor", 1.0),
            ),
            shared_size=file.count("share_expert_dim", 1280),
            dense_layers=read_enumerated_layers(file, layers, 3),
            limits=_limits(file, "swiglu_limits", layers),
            shared_limits=_limits(file, "swiglu_limits_shared", layers),
        )  # fmt: skip
        # This raises ConfigError for a layer whose heads do not fit.
        for layer in range(layers):
            config.of_layer(layer)
        return config


def _heads(file: ConfigFile, kinds: list[str]) -> tuple[int, ...]:
    """Return the query heads of each layer."""
    whole, other = file.count("num_attention_heads"), file.part("attention_other_setting")
    same = {"num_attention_groups": file.count("num_key_value_heads", 8), "head_dim": file.count("head_dim", 128),
            "attention_type": "sliding_attention"}  # fmt: skip
    for name, value in same.items():
        other.require_absent(name, value)
    narrow = file.count("num_sliding_attention_heads", other.count("num_attention_heads", whole))
    own = {str(layer): {"num_attention_heads": narrow} for layer, kind in enumerate(kinds) if kind == _KINDS[1]}
    file.require_absent("per_layer_config", own, *([{}] if narrow == whole else []))
    return tuple(narrow if kind == _KINDS[1] else whole for kind in kinds)


def read_enumerated_layers(file: ConfigFile, layers: int, first: int) -> frozenset[int]:
    """Return the layers without experts: all but those of moe_layers_enum. first: as in read_layers_without_experts,
    where the field is absent."""
    sparse = file.fields.get("moe_layers_enum")
    if "mlp_layer_types" in file.fields or sparse is None:
        return read_layers_without_experts(file, layers, first)
    try:
        found = {int(each) for each in (sparse.split(",") if isinstance(sparse, str) else sparse) if each != ""}
    except (TypeError, ValueError):
        raise ConfigError(f"moe_layers_enum in config.json is {sparse!r}; it must be a list of layers") from None
    return frozenset(range(layers)) - found


def _limits(file: ConfigFile, name: str, layers: int) -> tuple[float, ...]:
    """Return a limit of each layer, 0 where there is none."""
    limits = file.fields.get(name) or [0.0] * layers
    valid = isinstance(limits, list) and len(limits) == layers
    if not valid or not all(limit is None or (isinstance(limit, int | float) and limit >= 0) for limit in limits):
        raise ConfigError(f"{name} in config.json must be a list of numbers of at least 0, one for each of {layers}")
    return tuple(float(limit or 0) for limit in limits)


def _rope(file: ConfigFile, kinds: list[str], kind: str) -> Rope:
    """Return the rotation of the layers of a kind. The authors' own configs have its parameters by layer."""
    by_kind = file.part("rope_parameters")
    if all(isinstance(by_kind.fields.get(each), dict) for each in kinds):
        parameters = by_kind.part(kind).fields
    else:
        lists = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}
        parameters = {ours: _of_kind(file, name, kinds, kind) for ours, name in lists.items()}
        parameters |= file.part("rope_scaling").fields if kind == _KINDS[0] else {}
    return partial_rope(ConfigFile(parameters), 10000.0, file.count("max_position_embeddings", _CONTEXT), file)


def _of_kind(file: ConfigFile, name: str, kinds: list[str], kind: str) -> float | None:
    """Return the number of a field for the layers of a kind. The field has one number, or one for each layer."""
    value = file.fields.get(name)
    if not isinstance(value, list):
        return None if value is None else file.number(name)
    found = {each for each, own in zip(value, kinds, strict=False) if own == kind}
    if len(value) != len(kinds) or len(found) > 1 or not all(isinstance(each, int | float) for each in found):
        raise ConfigError(f"{name} in config.json must have a number for each layer, the same for all {kind} layers")
    return float(found.pop()) if found else None
