"""The forward pass of models with several residual streams of each token."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from baton_engine.context import Context
from baton_engine.layers.hyper_connections import Mixing

from .decoder import Decoder

# A kernel has the weights with which a token mixes its streams in one tile.
MOST_STREAMS = 16


class WithStreams:
    """A part of the config of such a model. mixing: of the streams."""

    hidden_size: int
    mixing: Mixing

    @property
    def stream_size(self) -> int:
        return self.mixing.streams * self.hidden_size


class Connection(Protocol):
    """What a block of a layer reads from the streams, and how its result is added to them
    (layers/hyper_connections.py)."""

    def inputs(self, streams: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def add(self, result: torch.Tensor, gates: Any, streams: torch.Tensor) -> torch.Tensor: ...


class StreamLayer(Protocol):
    """A layer whose two blocks have connections to the streams."""

    input_norm: Any
    post_attention_norm: Any

    @property
    def attention(self) -> Callable[..., torch.Tensor]: ...

    @property
    def mlp(self) -> Callable[..., torch.Tensor]: ...

    @property
    def around_attention(self) -> Connection: ...

    @property
    def around_mlp(self) -> Connection: ...


def pass_streams(layer: StreamLayer, streams: torch.Tensor, ctx: Context, *given: torch.Tensor) -> torch.Tensor:
    """Return the streams of the tokens after a layer, [T, streams * hidden]. given: what its MLP takes beside hidden
    states."""
    x, gates = layer.around_attention.inputs(streams)
    streams = layer.around_attention.add(layer.attention(layer.input_norm(x), ctx), gates, streams)
    x, gates = layer.around_mlp.inputs(streams)
    return layer.around_mlp.add(layer.mlp(layer.post_attention_norm(x), *given), gates, streams)


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
        hidden: torch.Tensor = self.norm(self.stream_head(streams)) if self.stage.is_last else streams
        return hidden
