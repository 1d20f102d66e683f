"""What the engine needs of a model, whatever its family."""

from typing import Protocol

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.model_config import ModelConfig
from baton_engine.source import Source


class Model(Protocol):
    """Token ids to hidden states, and hidden states to logits.

    dtype: of both.
    """

    dtype: torch.dtype

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        """Return the facts of a config.json. Raises ConfigError for what cannot be served."""

    # A family knows its own kind of config, which read_config returned.
    def __init__(self, config: ModelConfig, source: Source, max_positions: int) -> None:
        """Take the weights. max_positions: beyond which no token will be."""

    def __call__(self, ctx: Context) -> torch.Tensor:
        """Return hidden states [T, hidden] of the context's tokens."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab], in out when given."""
