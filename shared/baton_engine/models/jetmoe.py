"""JetMoE (Shen et al., 2024): experts of attention and of the MLP, with a bias of each sum."""

from collections.abc import Callable
from typing import Any, Self

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.inputs import InputRows
from baton_engine.layers.expert_heads import ExpertHeads
from baton_engine.layers.experts import ExpertMlp, Router, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Heads, Place
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token

_FORM = JoinedForm("input_linear.weight", "output_linear.weight", apart="experts")
# The epsilon of the norms before blocks, whatever config.json says.
_EPS = 1e-6


class JetMoeConfig(SparseConfig, frozen=True, kw_only=True):
    """final_eps: of the norm after the last layer."""

    final_eps: float

    @property
    def projections(self) -> list[tuple[int, int]]:
        keys = self.num_kv_heads * self.head_dim
        queries = self.num_experts * keys
        return [(queries + 2 * keys, self.hidden_size), (self.hidden_size, queries)]

    def part(self, ranks: Place) -> Self:
        if ranks.count > self.num_kv_heads:
            raise ConfigError(f"--tensor-parallel {ranks.count} is more than the {self.num_kv_heads} key-value heads")
        return super().part(ranks)


class _Biased:
    """Experts with a bias of their sum, [hidden]."""

    def __init__(self, mlp: ExpertMlp, bias: torch.Tensor) -> None:
        self._mlp, self._bias, self.inputs = mlp, bias, mlp.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        return self._mlp(x).add_(self._bias)


class JetMoeLayer(LlamaLayer):
    blocks = ("self_attention", "mlp")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, JetMoeConfig)
        hidden, size, experts = config.hidden_size, config.num_kv_heads * config.head_dim, source.at("experts")
        shard = Heads(source.ranks, config.head_dim)
        keys_values = Linear(source, ["kv_proj"], [2 * size], hidden, parts=[size, size], shard=shard)
        bias = experts.take("bias", (hidden,))
        return ExpertHeads(config, layer, experts, config.routing, keys_values, bias, rotary)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, JetMoeConfig)
        source, experts, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        router = Router(source.at("router.layer"), config.routing, experts, hidden)
        held = load_joined_experts(source, experts, hidden, config.expert_size, _FORM.gated(config.activation))
        return _Biased(ExpertMlp(router, held, source.ranks), source.take("bias", (hidden,)))


class JetMoe(Llama):
    layer = JetMoeLayer

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm:
        assert isinstance(config, JetMoeConfig)
        return RmsNorm(source.at("norm"), config.hidden_size, config.final_eps)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        experts, size = file.count("num_local_experts", 8), file.count("intermediate_size", 5632)
        used, keys = read_experts_per_token(file, experts, 2), file.count("num_key_value_heads", 16)
        sizes = {
            "vocab_size": file.count("vocab_size", 32000), "hidden_size": file.count("hidden_size", 2048),
            "num_hidden_layers": file.count("num_hidden_layers", 12), "num_attention_heads": used * keys,
            "num_key_value_heads": keys, "head_dim": file.count("kv_channels", 128), "intermediate_size": size,
            "hidden_act": file.fields.get("activation_function"),
        }  # fmt: skip
        return read_llama_config(
            JetMoeConfig,
            ConfigFile({**file.fields, **sizes}),
            Defaults(4096, tie_word_embeddings=True),
            eps=_EPS,
            final_eps=file.number("rms_norm_eps", 1e-6),
            num_experts=experts,
            expert_size=size,
            # The softmax of the chosen experts' logits alone.
            routing=Routing(used, normalize=True),
        )
