"""The forward pass of models with several residual streams of each token."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from baton_engine.context import Context

from .decoder import Decoder


class StreamLayer(Protocol):
    """A layer with connections of its two blocks to the streams, as layers/hyper_connections.py has them."""

    attention: Callable[..., torch.Tensor]
    mlp: Callable[..., torch.Tensor]
    input_norm: Any
    post_attention_norm: Any
    around_attention: Any
    around_mlp: Any


def pass_streams(layer: StreamLayer, streams: torch.Tensor, ctx: Context) -> torch.Tensor:
    """Return the streams of the tokens after a layer, [T, streams * hidden]."""
    x, gates = layer.around_attention.inputs(streams)
    streams = layer.around_attention.add(layer.attention(layer.input_norm(x), ctx), gates, streams)
    x, gates = layer.around_mlp.inputs(streams)
    return torch.as_tensor(layer.around_mlp.add(layer.mlp(layer.post_attention_norm(x)), gates, streams))


class StreamDecoder(Decoder):
    """A model whose layers return all streams: streams = layer(streams, ctx). A stage of a pipeline passes them on.

    streams: of each token. stream_head: turns [T, streams * hidden] into [T, hidden].
    """

    streams: int
    stream_head: Callable[[torch.Tensor], torch.Tensor]

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).repeat(1, self.streams)

    def __call__(self, ctx: Context) -> torch.Tensor:
        streams = self.begin(ctx)
        for layer in self.layers:
            streams = layer(streams, ctx)
        return torch.as_tensor(self.norm(self.stream_head(streams))) if self.stage.is_last else streams
