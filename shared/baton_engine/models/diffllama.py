"""DiffLlama (2024): Llama with differential attention."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.differential_attention import DifferentialAttention, Expanded
from baton_engine.layers.linear import Linear
from baton_engine.shard import Heads, Place, Rows, head_part
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class DiffLlamaConfig(LlamaConfig, frozen=True, kw_only=True):
    """num_heads, num_kv_heads: of the cache, twice those of the checkpoint."""

    @property
    def pairs(self) -> int:
        """Of the checkpoint's key-value heads."""
        return self.num_kv_heads // 4

    @property
    def queries(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def projections(self) -> list[tuple[int, int]]:
        queries, keys = (heads // 2 * self.head_dim for heads in (self.num_heads, self.num_kv_heads))
        return [(queries + 2 * keys, self.hidden_size), (self.hidden_size, queries)]

    def part(self, ranks: Place) -> Self:
        if self.pairs % ranks.count:
            raise ConfigError(
                f"--tensor-parallel {ranks.count} does not divide the {self.pairs} pairs of key-value heads"
            )
        return super().part(ranks)


class DiffLlamaLayer(LlamaLayer):
    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, DiffLlamaConfig)
        dim, pairs, each, hidden = config.head_dim, config.pairs, config.queries, config.hidden_size
        queries, keys = 2 * pairs * each * dim, 2 * pairs * dim
        output = Linear(source, [self.output], [hidden], queries, bias=config.output_bias, shard=Rows(source.ranks))
        names, shard, bias = ["q_proj", "k_proj", "v_proj"], Heads(source.ranks, dim), config.qkv_bias
        sizes, order = [queries, keys, keys], _by_pair(pairs, each, dim)
        qkv = Linear(source, names, sizes, hidden, bias=bias, order=order, shard=shard)
        own = head_part(pairs, source.ranks)
        expanded = Expanded(qkv, own.stop - own.start, each, dim)
        return DifferentialAttention(
            source, 0.8 - 0.6 * math.exp(-0.3 * layer), pairs, config.rms_norm_eps, dim, config, layer, source,
            expanded, output, rotary,
        )  # fmt: skip


def _by_pair(pairs: int, queries: int, dim: int) -> list[int]:
    """Return the outputs of the projections in the order of Expanded. A checkpoint has the first heads of all pairs,
    and then the second ones."""
    sizes = [2 * pairs * each * dim for each in (queries, 1, 1)]
    heads = torch.split(torch.arange(sum(sizes)), sizes)
    order: list[int] = torch.cat([each.view(2, pairs, -1).transpose(0, 1).flatten() for each in heads]).tolist()
    return order


class DiffLlama(Llama):
    layer = DiffLlamaLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        heads, bias = file.count("num_attention_heads", 32), file.flag("attention_bias")
        keys, hidden = file.count("num_key_value_heads", heads), file.count("hidden_size", 2048)
        if keys % 2:
            raise ConfigError(f"num_key_value_heads in config.json is {keys}; it must be even")
        sizes = {
            "vocab_size": file.count("vocab_size", 32000), "intermediate_size": file.count("intermediate_size", 8192),
            "hidden_size": hidden, "num_hidden_layers": file.count("num_hidden_layers", 16),
            "num_attention_heads": 2 * heads, "num_key_value_heads": 2 * keys,
            "head_dim": file.count("head_dim", hidden // heads),
        }  # fmt: skip
        return read_llama_config(
            DiffLlamaConfig,
            ConfigFile({**file.fields, **sizes}),
            Defaults(2048, rms_norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
        )
