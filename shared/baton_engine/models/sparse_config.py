"""The config of models whose layers have experts."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .llama import LlamaConfig


class SparseConfig(LlamaConfig, frozen=True, kw_only=True):
    """The config of a model of Llama layers that may have experts.

    expert_size: hidden units of an expert. routing: how a token's experts are chosen. shared_size: hidden units of the
    expert that all tokens use, 0 = there is none. dense_layers: the layers with an MLP in place of experts.
    """

    num_experts: int
    expert_size: int
    routing: Routing
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    @property
    def layer_weights(self) -> int:
        """As in ModelConfig, on average over layers with experts and without."""
        return round(self._weights(self.routing.count))

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers with experts and without."""
        return self._units(self.routing.count)

    def layer_weights_read(self, tokens: float) -> float:
        """As in ModelConfig, on average, for tokens that use all experts equally often."""
        unused = (1 - self.routing.count / self.num_experts) ** tokens
        return self._weights(self.num_experts * (1 - unused))

    def _weights(self, experts: float) -> float:
        routers = self.num_experts * self.hidden_size * (1 - len(self.dense_layers) / self.num_layers)
        return self.attention_weights + routers + 3 * self.hidden_size * self._units(experts)

    def _units(self, experts: float) -> float:
        """Return the hidden units of a layer that uses so many experts, on average over layers."""
        dense = len(self.dense_layers) / self.num_layers
        return dense * self.intermediate_size + (1 - dense) * (experts * self.expert_size + self.shared_size)


def read_experts_per_token(file: ConfigFile, experts: int, default: int) -> int:
    """Return how many experts a token uses. Raises ConfigError if there are not so many."""
    return file.at_most("num_experts_per_tok", experts, default)


def read_grouped_routing(file: ConfigFile, experts: int, chosen: int, **how: Any) -> Routing:
    """Return the routing of a config.json with DeepSeek's fields for groups of experts.

    chosen: the family's default for the experts of a token. how: the other fields of Routing. Raises ConfigError if the
    groups do not hold enough experts.
    """
    groups = file.count("n_group", 1)
    routing = Routing(
        count=read_experts_per_token(file, experts, chosen),
        scale=file.number("routed_scaling_factor", 1.0),
        groups=groups,
        used_groups=file.at_most("topk_group", groups, 1),
        **how,
    )
    least = max(routing.group_best, -(-routing.count // routing.used_groups))
    if experts % groups or experts // groups < least:
        raise ConfigError(
            f"n_group in config.json is {groups}; it must divide the {experts} experts into groups of at least {least}"
        )
    return routing


def read_layers_without_experts(file: ConfigFile, layers: int, first: int) -> frozenset[int]:
    """Return the layers without experts: those that mlp_layer_types calls dense, or else the first_k_dense_replace
    first ones. first: the default of the latter."""
    types = file.fields.get("mlp_layer_types")
    if types is None:
        return frozenset(range(min(file.integer("first_k_dense_replace", first), layers)))
    if not isinstance(types, list) or len(types) != layers or not all(kind in ("dense", "sparse") for kind in types):
        raise ConfigError(f"mlp_layer_types in config.json must be a list of dense or sparse, one for each of {layers}")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")


def read_layers_between_experts(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts, as DeepSeek's first configs name them: the first_k_dense_replace first ones,
    and those whose number is not a multiple of moe_layer_freq."""
    first, every = file.integer("first_k_dense_replace", 0), file.count("moe_layer_freq", 1)
    return frozenset(layer for layer in range(layers) if layer < first or layer % every)


def read_dense_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts, as Qwen's configs name them."""
    step, dense = file.count("decoder_sparse_step", 1), file.integers("mlp_only_layers")
    return frozenset(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
