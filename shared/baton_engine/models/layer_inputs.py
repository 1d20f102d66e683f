"""Inputs that each layer gets for each token beside the hidden states (Gemma Team, Gemma 3n, 2025)."""

import torch

from baton_engine.layers.embedding import Embedding
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import WideRmsNorm
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS


class LayerInputs:
    """A vector of the token, and a projection of its embedding.

    size: elements of a layer's input. vocab: how many tokens have vectors; the others have that of token 0.
    """

    def __init__(self, source: Source, layers: int, size: int, vocab: int, hidden: int, eps: float) -> None:
        self._size, self._vocab, self._scale = size, vocab, hidden**-0.5
        self._vectors = Embedding(source.at("embed_tokens_per_layer"), vocab, layers * size, scale=size**0.5)
        self._projection = Linear(source, ["per_layer_model_projection"], [layers * size], hidden)
        self._norm = WideRmsNorm(source.at("per_layer_projection_norm"), size, eps)

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """ids: [T] int64. x: [T, hidden], their embedding. Returns [layers, T, size]."""
        projected = self._norm(self._projection(x).mul_(self._scale).view(-1, self._size))
        vectors = self._vectors(ids.masked_fill(ids >= self._vocab, 0))
        both = vectors.view_as(projected).add_(projected).mul_(0.5**0.5)
        return both.view(len(ids), -1, self._size).transpose(0, 1)


class InputGate:
    """Turns a layer's own input into what it adds to the hidden states, which decide how much of it counts."""

    def __init__(self, source: Source, size: int, hidden: int, eps: float, activation: str) -> None:
        self._activation = ACTIVATIONS[activation]
        self._gate = Linear(source, ["per_layer_input_gate"], [size], hidden)
        self._projection = Linear(source, ["per_layer_projection"], [hidden], size)
        self._norm = WideRmsNorm(source.at("post_per_layer_input_norm"), hidden, eps)

    def __call__(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. given: [T, size]. Returns a new tensor [T, hidden]."""
        return self._norm(self._projection(self._activation(self._gate(x)).mul_(given)))
