"""The config of models whose layers have experts."""

from baton_engine.config_file import ConfigFile

from .llama import LlamaConfig


class SparseConfig(LlamaConfig, frozen=True, kw_only=True):
    """The config of a model of Llama layers that may have experts.

    expert_size: hidden units of an expert. experts_per_token: how many experts a token uses. normalize: whether their
    weights are divided by their sum. shared_size: hidden units of the expert that all tokens use, 0 = there is none.
    dense_layers: the layers with an MLP in place of experts.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    normalize: bool
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    @property
    def layer_weights(self) -> int:
        """As in ModelConfig, on average over layers with experts and without."""
        return round(self._on_average(self.experts_per_token))

    def layer_weights_read(self, tokens: float) -> float:
        """As in ModelConfig, on average, for tokens that use all experts equally often."""
        unused = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self._on_average(self.num_experts * (1 - unused))

    def _on_average(self, experts: float) -> float:
        sparse = experts * self.expert_size + self.shared_size
        dense = len(self.dense_layers)
        inner = (dense * self.intermediate_size + (self.num_layers - dense) * sparse) / self.num_layers
        return self.attention_weights + 3 * self.hidden_size * inner


def read_experts_per_token(file: ConfigFile, experts: int, default: int) -> int:
    """Return how many experts a token uses. Raises ConfigError if there are not so many."""
    return file.at_most("num_experts_per_tok", experts, default)


def read_dense_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts, as Qwen's configs name them."""
    step, dense = file.count("decoder_sparse_step", 1), file.integers("mlp_only_layers")
    return frozenset(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
