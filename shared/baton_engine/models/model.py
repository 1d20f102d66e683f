"""The interface that the engine needs of every model."""

from typing import Protocol

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.embedding import Head
from baton_engine.model_config import ModelConfig
from baton_engine.source import Source


class Model(Protocol):
    """Computes hidden states from token ids, and logits from hidden states. dtype: of hidden states. head: gives the
    logits."""

    dtype: torch.dtype
    head: Head

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        """Return the config that a config.json describes. Raises ConfigError for a model that cannot be served."""

    # `config` comes from read_config of the same class, so a family can declare its own subclass here.
    def __init__(self, config: ModelConfig, source: Source, max_positions: int) -> None:
        """Read the weights. max_positions: the most tokens of a sequence."""

    def __call__(self, ctx: Context) -> torch.Tensor:
        """Return hidden states [T, hidden] of the context's tokens."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab], in out when given."""
