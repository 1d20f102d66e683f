"""A model whose layers are in memory one at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from baton_common.kv_layout import KvLayout
from baton_engine.attention.backend import AttentionBatch, StepLimits
from baton_engine.attention.torch_sdpa import TorchSdpa
from baton_engine.checkpoint import Checkpoint
from baton_engine.config import ConfigError
from baton_engine.context import Context, Tokens
from baton_engine.kv_cache import KvCache
from baton_engine.layers.embedding import Embedding, head
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import rotary_tables
from baton_engine.loading import Weights, dtype_name
from baton_engine.models.llama import Layer, Llama, LlamaConfig
from baton_engine.models.registry import load_model_config, model_class
from baton_engine.ops import TORCH
from baton_engine.quantization.dense import as_stored
from baton_engine.source import Policy, Source

# The architectures whose layers can be computed one at a time here, and whose folds `smoothing.py` knows.
SERVED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
_BLOCK_SIZE = 16


class _OneLayerCache(KvCache):
    """A cache that all layers use in turns, as only one of them is computed at a time."""

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return super().layer(0)

    def group_of(self, layer: int) -> int:
        return 0


class StreamedModel:
    """Computes the hidden states of whole sequences, layer by layer, on one device.

    Products, norms and attention are those of the engine in plain torch, so no family has a second forward pass here.
    """

    def __init__(self, folder: Path, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """length: the most tokens of a sequence. Raises ConfigError for a model that is not served."""
        config = load_model_config(folder)
        if config.architecture not in SERVED:
            raise ConfigError(
                f"{config.architecture} cannot be quantized offline; Baton quantizes {', '.join(SERVED)}. "
                "Engines can quantize any model on load by --quantization"
            )
        assert isinstance(config, LlamaConfig)
        self.config = config.limited(length)
        self.checkpoint = Checkpoint.read(folder)
        self.dtype, self.device = dtype, device
        self._kind = cast(type[Llama], model_class(config.architecture))
        self._rotary = rotary_tables(self.config.rope, self.config.rotary_dim, length, device)
        self._contexts: dict[int, Context] = {}

    def prefix(self, layer: int) -> str:
        """Return the beginning of the names of a layer's tensors, up to and with the last dot."""
        return f"model.layers.{layer}."

    @torch.inference_mode()
    def embed(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the hidden states before the first layer, [T, hidden] on the host for each sequence of token ids."""
        with self._weights(self._part(self.checkpoint, "model.embed_tokens.")) as weights:
            embedding = self._embedding(weights)
        return [embedding(window.to(self.device)).cpu() for window in windows]

    def layer(self, index: int, checkpoint: Checkpoint, policy: Policy) -> Layer:
        """Read a layer. checkpoint: has its tensors. policy: how they are stored."""
        with self._weights(self._part(checkpoint, self.prefix(index))) as weights:
            source = Source(weights, TORCH, policy).at("model").at(f"layers.{index}")
            return self._kind.layer(
                self.config, source, index, None if self.config.rope_of(index) is None else self._rotary
            )

    @torch.inference_mode()
    def run(self, layer: Layer, hidden: list[torch.Tensor], each: Callable[[], None] = lambda: None) -> None:
        """Replace the hidden states of each sequence by those after a layer. each: called after each sequence."""
        for number, before in enumerate(hidden):
            x, residual = layer(before.to(self.device, copy=True), None, self._context(len(before)))
            hidden[number] = residual.add_(x).cpu()
            each()

    def head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from hidden states [T, hidden] after the last layer to logits [T, vocab]."""
        names = ("model.norm.", "lm_head.", "model.embed_tokens.")
        with self._weights(self._part(self.checkpoint, *names)) as weights:
            source = Source(weights, TORCH, as_stored)
            norm = RmsNorm(source.at("model").at("norm"), self.config.hidden_size, self.config.rms_norm_eps)
            output = head(source, self._embedding(weights), self.config.tie_word_embeddings)

        @torch.inference_mode()
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            return output(norm(hidden.to(self.device)))

        return logits

    def tensors(self, chosen: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """Return the tensors with the chosen names, as they are stored, on the host."""
        part = self.checkpoint.part(chosen)
        with Weights(part.folder, self.dtype, torch.device("cpu"), checkpoint=part) as weights:
            return {
                name: weights.take(name, weights.stored_shape(name), None, weights.stored_dtype(name))
                for name in sorted(part.names)
            }

    def _embedding(self, weights: Weights) -> Embedding:
        source = Source(weights, TORCH, as_stored).at("model").at("embed_tokens")
        return Embedding(source, self.config.vocab_size, self.config.hidden_size)

    def _weights(self, part: Checkpoint) -> Weights:
        return Weights(part.folder, self.dtype, self.device, checkpoint=part)

    def _part(self, checkpoint: Checkpoint, *prefixes: str) -> Checkpoint:
        return checkpoint.part(lambda name: name.startswith(prefixes))

    def _context(self, length: int) -> Context:
        """Return the context of a pass over one sequence."""
        if length not in self._contexts:
            planes = self.config.kv_layout(dtype_name(self.dtype)).planes
            cache = _OneLayerCache(KvLayout(1, planes, ()), _BLOCK_SIZE, self.device, TORCH)
            blocks = -(-length // _BLOCK_SIZE)
            cache.allocate(blocks)
            config = self.config
            backend = TorchSdpa(cache, config.num_heads, config.attention, StepLimits(1, length))
            backend.prepare(AttentionBatch([0, length], [length], np.arange(blocks, dtype=np.int32)[None, None]))
            positions = torch.arange(length, device=self.device)
            self._contexts = {length: Context(Tokens(positions, positions, positions[None]), cache, backend)}
        return self._contexts[length]
