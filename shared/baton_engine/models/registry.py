"""The class that serves each architecture. A family's module is imported only when one of its models is served."""

from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.model_config import ModelConfig

from .model import Model

# For each architecture in config.json, the module in this package and the class in that module.
MODELS = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "QWenLMHeadModel": ("qwen", "Qwen"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "BloomForCausalLM": ("bloom", "Bloom"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "FalconForCausalLM": ("falcon", "Falcon"),
    "Phi3ForCausalLM": ("phi3", "Phi3"),
    "GPT2LMHeadModel": ("gpt2", "Gpt2"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GptNeoX"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "GraniteForCausalLM": ("granite", "Granite"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLm3"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "Qwen2Moe"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3Moe"),
    "OlmoeForCausalLM": ("olmoe", "Olmoe"),
    "GptOssForCausalLM": ("gpt_oss", "GptOss"),
    "Glm4MoeForCausalLM": ("glm4_moe", "Glm4Moe"),
}


def model_class(architecture: str) -> type[Model]:
    """Return the class that serves an architecture. Raises ConfigError if there is none."""
    if architecture not in MODELS:
        nearest = max(MODELS, key=lambda served: _letters_in_common(served, architecture))
        # Names of one family begin with the same letters, such as Phi, GPT or Qwen.
        related = _letters_in_common(nearest, architecture) >= 3
        hint = f", whose nearest relative by name is {nearest}" if related else ""
        raise ConfigError(f"unknown architecture {architecture}{hint}; served are {', '.join(MODELS)}")
    module, name = MODELS[architecture]
    return cast(type[Model], getattr(import_module(f".{module}", __package__), name))


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a Hugging Face model folder. Raises ConfigError for a model that cannot be served."""
    return _parse(ConfigFile.read(folder))


def parse_model_config(fields: dict[str, Any]) -> ModelConfig:
    """Return the config from the contents of a config.json, as load_model_config does from the file."""
    return _parse(ConfigFile(fields))


def _parse(file: ConfigFile) -> ModelConfig:
    kind = model_class(file.architecture)
    quantization = file.fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method")
        raise ConfigError(f"the weights are quantized ({method}), which is not served; use a checkpoint that is not")
    return kind.read_config(file)


def _letters_in_common(one: str, other: str) -> int:
    """Return with how many of the same letters two names begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
