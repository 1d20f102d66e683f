"""The text part of Llama 3.2 Vision (Meta, 2024): Llama 3.1 with further layers that attend to images.

Without an image the further layers change nothing, so they are neither read nor computed.
"""

from typing import Any

from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Embedding
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, read_llama_config

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "eos_token_id": 128001,
}  # fmt: skip
_CROSS_ATTENTION_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
_IMAGE_TOKENS = 8  # their rows of the embedding come after those of the vocabulary


class MllamaConfig(LlamaConfig, frozen=True, kw_only=True):
    """num_layers: without those that attend to images. places: the number of each layer in the checkpoint."""

    places: tuple[int, ...]

    def place_of(self, layer: int) -> int:
        return self.places[layer]

    @property
    def known_tokens(self) -> int:
        return self.vocab_size + _IMAGE_TOKENS


class Mllama(Llama):
    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        return Embedding(source, config.vocab_size, config.hidden_size, unread=_IMAGE_TOKENS)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        given = file.fields.get("cross_attention_layers")
        cross = _CROSS_ATTENTION_LAYERS if given is None else file.integers("cross_attention_layers")
        places = tuple(layer for layer in range(file.count("num_hidden_layers")) if layer not in cross)
        file.require_absent("head_dim", file.count("hidden_size") // file.count("num_attention_heads"))
        # The head is never tied, because the embedding has rows for images, too.
        fields = {"num_hidden_layers": len(places), "tie_word_embeddings": False}
        return read_llama_config(
            MllamaConfig,
            ConfigFile({**file.fields, **fields}),
            Defaults(131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0),
            places=places,
        )
