"""The text part of models that read images or sound, too. Images and sound are not served."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Head, head
from baton_engine.source import Source

from .model import Model

# The architecture of the text part, for kinds of models that all have the same one.
TEXT_PARTS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniThinkerForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeTextModel",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4vTextModel",
    "Glm4vMoeForConditionalGeneration": "Glm4vMoeTextModel",
    "Glm5NextForConditionalGeneration": "Glm5NextTextModel",
    "GlmOcrForConditionalGeneration": "GlmOcrTextModel",
    "HunYuanVLForConditionalGeneration": "HunYuanDenseV1ForCausalLM",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCRTextModel",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "HyperCLOVAXForCausalLM",
    "HCXVisionV2ForCausalLM": "HyperCLOVAXForCausalLM",
    "GraniteDoclingForConditionalGeneration": "GraniteForCausalLM",
    "AriaForConditionalGeneration": "AriaTextForCausalLM",
    "DeepseekOcr2ForConditionalGeneration": "DeepseekOcr2TextModel",
    "Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_VLMoeTextModel",
    "Ernie4_5_VL_MoeForConditionalGeneration": "Ernie4_5_VLMoeTextModel",
    "Molmo2ForConditionalGeneration": "Molmo2TextModel",
    "MuseGlimmerForConditionalGeneration": "MuseGlimmerTextModel",
    "MuseSparkForConditionalGeneration": "MuseSparkTextModel",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3VLForCausalLM",
    "MllamaForConditionalGeneration": "MllamaForCausalLM",
    "CohereCompassForConditionalGeneration": "CohereCompassForCausalLM",
    "Dots3NoteForConditionalGeneration": "Dots3NoteForCausalLM",
    "Emu3ForConditionalGeneration": "Emu3ForCausalLM",
    "Step3VLForConditionalGeneration": "Step3TextForCausalLM",
    "Step3p7ForConditionalGeneration": "Step3p5ForCausalLM",
    "FuyuForCausalLM": "PersimmonForCausalLM",
    "Phi3VForCausalLM": "Phi3VTextModel",
    "Phi4MMForCausalLM": "Phi4MmTextModel",
    "DotsOCRForCausalLM": "Qwen2ForCausalLM",
    "OpenCUAForConditionalGeneration": "Qwen2ForCausalLM",
    "KananaVForConditionalGeneration": "LlamaForCausalLM",
    "StepVLForConditionalGeneration": "Qwen3ForCausalLM",
    "IsaacForConditionalGeneration": "Qwen3ForCausalLM",
    "Tarsier2ForConditionalGeneration": "Qwen2ForCausalLM",
    "KeyeForConditionalGeneration": "Qwen3ForCausalLM",
    "KeyeVL1_5ForConditionalGeneration": "Qwen3ForCausalLM",
    # The weights of its adapters for images and sound are apart.
    "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
}
# Kinds of models whose text_config names one of many families, with the model_type to assume if there is none.
ANY_TEXT_PART: dict[str, str] = {
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Lfm3VlForConditionalGeneration": "lfm3",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "VipLlavaForConditionalGeneration": "llama",
    "VideoLlavaForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "InternVLChatModel": "qwen2",
    "Ovis2ForConditionalGeneration": "qwen2",
    "Ovis": "qwen2",
    "Ovis2_5": "qwen3",
    "Ovis2_6ForCausalLM": "qwen3",
    "Ovis2_6_MoeForCausalLM": "qwen3_moe",
    "InternS1ForConditionalGeneration": "qwen3",
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "VoxtralForConditionalGeneration": "llama",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "FastVlmForConditionalGeneration": "qwen2",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "LightOnOCRForConditionalGeneration": "qwen3",
    "Granite4VisionForConditionalGeneration": "granite4_vision_text",
    "PerceptionLMForConditionalGeneration": "llama",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "JanusForConditionalGeneration": "llama",
    "DeepseekVLForConditionalGeneration": "llama",
    "DeepseekVLHybridForConditionalGeneration": "llama",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "SkyworkR1VChatModel": "qwen2",
    "H2OVLChatModel": "mistral",
    "RForConditionalGeneration": "qwen3",
    "BeeForConditionalGeneration": "qwen3",
    "TarsierForConditionalGeneration": "llama",
    "Eagle2_5_VLForConditionalGeneration": "qwen2",
    "HCXVisionForCausalLM": "llama",
    "Llama_Nemotron_Nano_VL": "llama",
    "NVLM_D": "qwen2",
    "NVLM_D_Model": "qwen2",
}
# Kinds of models that have another text part in each version.
_VERSIONS: dict[str, dict[str, str]] = {
    "MiniCPMV": {
        "2.0": "MiniCPMForCausalLM",
        "2.5": "LlamaForCausalLM",
        "2.6": "Qwen2ForCausalLM",
        "4.0": "LlamaForCausalLM",
        "4.5": "Qwen3ForCausalLM",
    },
    "MiniCPMO": {"2.6": "Qwen2ForCausalLM", "4.5": "Qwen3ForCausalLM"},
}
_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone4_5_text": "Exaone4ForCausalLM",
    "glm4v_text": "Glm4vTextModel",
    "glm4v_moe_text": "Glm4vMoeTextModel",
    "internlm2": "InternLM2ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Defaults of transformers' configuration classes for fields that text_config leaves out, as many published ones do. By
# the architecture of the text part, or of the whole model.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(zip(_SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "MistralForCausalLM": {**dict(zip(_SIZES, (32000, 4096, 14336, 32, 32), strict=True)), "sliding_window": 4096},
    "Qwen2ForCausalLM": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32), strict=True)),
    "Qwen3ForCausalLM": dict(zip(_SIZES, (151936, 4096, 22016, 32, 32), strict=True)),
    "Cohere2ForCausalLM": dict(zip(_SIZES, (256000, 8192, 22528, 40, 64), strict=True)),
    "VoxtralForConditionalGeneration": {
        **dict(zip(_SIZES, (131072, 3072, 8192, 30, 32), strict=True)),
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "head_dim": 128,
    },
    "GraniteDoclingForConditionalGeneration": {
        **dict(zip(_SIZES, (133800, 1024, 2048, 28, 16), strict=True)),
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"norm_topk_prob": True},
    "Qwen3OmniMoeForConditionalGeneration": {"norm_topk_prob": True},
    "Phi4MultimodalForCausalLM": {
        **dict(zip(_SIZES, (200064, 3072, 8192, 32, 32), strict=True)),
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "eos_token_id": [199999, 200020],
    },
}
# Architectures whose head is tied to the embedding unless config.json says otherwise.
_TIED = (
    "InternVLForConditionalGeneration", "Ovis2ForConditionalGeneration", "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration", "HunYuanVLForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "HCXVisionV2ForCausalLM", "GraniteDoclingForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration",
    "JanusForConditionalGeneration", "DeepseekVLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration",
)  # fmt: skip
# Where checkpoints have the embedding and the layers, and where the head.
_PLACES = (
    ("language_model.model", "language_model"), ("model.language_model", None), ("thinker.model", "thinker"),
    ("model.text_model", None), ("model", None), ("model.language_model.model", "model.language_model"),
    ("model.transformer", None), ("text_model.model", "text_model"),
    ("llm.model", "llm"), ("language.model", "language"),
)  # fmt: skip
_EMBEDDINGS = ("embed_tokens.weight", "wte.embedding", "tok_embeddings.weight")
# Fields of the whole model that hold for its text part where text_config leaves them out.
_OF_THE_WHOLE = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


class _TextPart:
    """Makes a family read its config and tensors from within a larger model."""

    embedding: Any
    head_name: str

    def parts(self, source: Source) -> tuple[Source, Source]:
        for inside, outside in _PLACES:
            if any(f"{inside}.{name}" in source for name in _EMBEDDINGS):
                head_place = inside if f"{inside}.{self.head_name}.weight" in source else outside
                return source.at(inside), source if head_place is None else source.at(head_place)
        raise ConfigError("the checkpoint has no tensor embed_tokens.weight of a language model")

    def make_head(self, config: Any, source: Source) -> Head:
        # Some config.json files say that the head is tied although the checkpoint has a separate head.
        tied = config.tie_word_embeddings and f"{self.head_name}.weight" not in source
        return head(source, self.embedding, tied, self.head_name)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Any:
        read: Any = super().read_config  # type: ignore[misc]
        return read(text_fields(file))


@cache
def text_part(kind: type[Model]) -> type[Model]:
    """Return a family as the text part of larger models. kind: the family."""
    return cast(type[Model], type(f"{kind.__name__}Text", (_TextPart, kind), {}))


def _by_model_type(file: ConfigFile) -> str:
    kind = _text_config(file).get("model_type") or ANY_TEXT_PART[file.architecture]
    if not isinstance(kind, str) or kind not in _FAMILIES:
        served = ", ".join(_FAMILIES)
        raise ConfigError(f"model_type {kind!r} of the text part in config.json is unknown; Baton serves {served}")
    return _FAMILIES[kind]


def _by_version(file: ConfigFile) -> str:
    version, parts = file.fields.get("version"), _VERSIONS[file.architecture]
    if version is None and file.architecture == "MiniCPMV":
        # The first two versions do not name theirs. Only 2.0 has the width of MiniCPM 2B.
        version = "2.0" if file.fields.get("hidden_size") == 2304 else "2.5"
    if str(version) not in parts:
        raise ConfigError(f"version {version!r} in config.json is unknown; Baton serves {', '.join(parts)}")
    return parts[str(version)]


def _by_latent_attention(file: ConfigFile) -> str:
    """Choose among DeepSeek's text parts, whose configs all call themselves DeepSeek-V2."""
    part = ConfigFile({**_text_config(file), "architectures": file.fields["architectures"]})
    if part.fields.get("topk_method") == "noaux_tc":
        return "DeepseekV3ForCausalLM"
    latent = part.flag("use_mla", part.fields.get("kv_lora_rank") is not None)
    return "DeepseekV2ForCausalLM" if latent else "DeepseekOcr2TextModel"


_DEEPSEEK = ("DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM")
# For each kind of models with one of several text parts, what chooses the text part's architecture.
CHOSEN_TEXT_PARTS: dict[str, Callable[[ConfigFile], str]] = {
    **dict.fromkeys(ANY_TEXT_PART, _by_model_type), **dict.fromkeys(_VERSIONS, _by_version),
    **dict.fromkeys(_DEEPSEEK, _by_latent_attention),
}  # fmt: skip


def text_fields(file: ConfigFile) -> ConfigFile:
    """Return the fields of the text part. Older forms of config.json have them beside those of the other parts."""
    # The architecture of a part that text_config names comes after that of the whole.
    architecture, _, named = file.architecture.partition("/")
    own = _text_config(file)
    fields = {**file.fields, **_object(file.fields, "thinker_config")}
    whole = {name: fields[name] for name in _OF_THE_WHOLE if fields.get(name) is not None}
    defaults = _DEFAULTS.get(architecture) or _DEFAULTS.get(named, {})
    given = {name: value for name, value in own.items() if value is not None or name not in _OF_THE_WHOLE}
    tied = ConfigFile(whole).flag("tie_word_embeddings", architecture in _TIED)
    tied = tied or ConfigFile(given).flag("tie_word_embeddings")
    tied_fields = {"tie_word_embeddings": True} if tied else {}
    return ConfigFile({**defaults, **whole, **given, **tied_fields, "architectures": file.fields["architectures"]})


def _text_config(file: ConfigFile) -> dict[str, Any]:
    fields = {**file.fields, **_object(file.fields, "thinker_config")}
    for name in ("text_config", "llm_config", "language_config"):
        if name in fields:
            return _object(fields, name)
    return fields


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} in config.json is {value!r}; it must be an object")
    return value
