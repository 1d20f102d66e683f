"""The text part of models that read images, too. Images are not served."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.embedding import Head, head
from baton_engine.layers.experts import load_joined_experts
from baton_engine.source import Source

from .deepseek_v3 import DeepseekV3
from .gemma3 import Gemma3
from .llama4 import Llama4
from .ministral3 import Ministral3
from .qwen2 import Qwen2
from .qwen2_moe import SparseQwenLayer
from .qwen3 import Qwen3
from .qwen3_moe import Qwen3Moe
from .sparse_config import SparseConfig

# Where checkpoints have the embedding and the layers, and where the head.
_PLACES = (("language_model.model", "language_model"), ("model.language_model", None), ("model", None))
_OF_THE_WHOLE = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


class _TextPart:
    """Makes a family read what it needs from within a larger model."""

    embedding: Any

    def parts(self, source: Source) -> tuple[Source, Source]:
        for inside, outside in _PLACES:
            if f"{inside}.embed_tokens.weight" in source:
                return source.at(inside), source if outside is None else source.at(outside)
        raise ConfigError("the checkpoint has no tensor embed_tokens.weight of a language model")

    def make_head(self, config: Any, source: Source) -> Head:
        # Some config.json call the head that of the embedding beside a head of its own.
        tied = config.tie_word_embeddings and "lm_head.weight" not in source
        return head(source, self.embedding, tied)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Any:
        read: Any = super().read_config  # type: ignore[misc]
        return read(text_fields(file))


def text_fields(file: ConfigFile) -> ConfigFile:
    """Return the fields of the text part. Older forms of config.json have them beside those of the other parts."""
    own = file.fields.get("text_config", file.fields)
    if not isinstance(own, dict):
        raise ConfigError(f"text_config in config.json is {own!r}; it must be an object")
    whole = {name: file.fields[name] for name in _OF_THE_WHOLE if file.fields.get(name) is not None}
    given = {name: value for name, value in own.items() if value is not None}
    tied = ConfigFile(whole).flag("tie_word_embeddings") or ConfigFile(given).flag("tie_word_embeddings")
    tied_fields = {"tie_word_embeddings": True} if tied else {}
    return ConfigFile({**whole, **given, **tied_fields, "architectures": file.fields["architectures"]})


class Gemma3Text(_TextPart, Gemma3):
    """Gemma 3 from 4B on."""


class Mistral3Text(_TextPart, Ministral3):
    """Mistral Small 3.1 and later, and Ministral 3."""


class Llama4Text(_TextPart, Llama4):
    """Llama 4 Scout and Maverick."""


class KimiText(_TextPart, DeepseekV3):
    """Kimi-K2.5."""


class Qwen2Text(_TextPart, Qwen2):
    """Qwen2-VL and Qwen2.5-VL."""


class Qwen3Text(_TextPart, Qwen3):
    """Qwen3-VL without experts."""


class _JoinedLayer(SparseQwenLayer):
    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, JoinedForm())


class Qwen3MoeText(_TextPart, Qwen3Moe):
    """Qwen3-VL with experts."""

    layer = _JoinedLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> Any:
        return super().read_config(ConfigFile({"norm_topk_prob": True, **text_fields(file).fields}))
