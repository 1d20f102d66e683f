"""The class that serves each architecture. A family's module is imported only when one of its models is served."""

from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.model_config import ModelConfig

from .model import Model
from .text_part import CHOSEN_TEXT_PARTS, TEXT_PARTS, text_part

# For each architecture in config.json, the module in this package and the class in that module.
MODELS = {
    "Lfm2ForCausalLM": ("lfm2", "Lfm2"),
    "Lfm2MoeForCausalLM": ("lfm2", "Lfm2Moe"),
    "BambaForCausalLM": ("bamba", "Bamba"),
    "JambaForCausalLM": ("jamba", "Jamba"),
    "MambaForCausalLM": ("mamba", "Mamba"),
    "FalconMambaForCausalLM": ("mamba", "FalconMamba"),
    "Mamba2ForCausalLM": ("mamba2", "Mamba2"),
    "RecurrentGemmaForCausalLM": ("recurrent_gemma", "RecurrentGemma"),
    "OlmoHybridForCausalLM": ("olmo_hybrid", "OlmoHybrid"),
    "FalconH1ForCausalLM": ("falcon_h1", "FalconH1"),
    "NemotronHForCausalLM": ("nemotron_h", "NemotronH"),
    "Zamba2ForCausalLM": ("zamba2", "Zamba2"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3Next"),
    "Qwen3_5ForCausalLM": ("qwen3_next", "Qwen35"),
    "Qwen3_5MoeForCausalLM": ("qwen3_next", "Qwen35Moe"),
    "MiniMaxForCausalLM": ("minimax", "MiniMax"),
    "KimiLinearForCausalLM": ("kimi_linear", "KimiLinear"),
    "BailingHybridForCausalLM": ("bailing_hybrid", "BailingHybrid"),
    "Lfm3ForCausalLM": ("lfm3", "Lfm3"),
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "QWenLMHeadModel": ("qwen", "Qwen"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "BloomForCausalLM": ("bloom", "Bloom"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "Gemma3nForCausalLM": ("gemma3n", "Gemma3n"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma4"),
    "Gemma4UnifiedForCausalLM": ("gemma4", "Gemma4Unified"),
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
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepseekV2"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "DeepseekV4"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepseekV3"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "DeepseekV32"),
    "GemmaForCausalLM": ("gemma", "Gemma"),
    "GlmForCausalLM": ("glm", "Glm"),
    "Glm4ForCausalLM": ("glm4", "Glm4"),
    "OlmoForCausalLM": ("olmo", "Olmo"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3"),
    "CohereForCausalLM": ("cohere", "Cohere"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2"),
    "Cohere2MoeForCausalLM": ("cohere2_moe", "Cohere2Moe"),
    "Starcoder2ForCausalLM": ("starcoder2", "Starcoder2"),
    "StableLmForCausalLM": ("stablelm", "StableLm"),
    "PhiForCausalLM": ("phi", "Phi"),
    "NemotronForCausalLM": ("nemotron", "Nemotron"),
    "ArceeForCausalLM": ("arcee", "Arcee"),
    "SeedOssForCausalLM": ("seed_oss", "SeedOss"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "Ernie45"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "Ernie45Moe"),
    "Exaone4ForCausalLM": ("exaone4", "Exaone4"),
    "MinistralForCausalLM": ("ministral", "Ministral"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "MiniMaxM2"),
    "MiniMaxM3VLForCausalLM": ("minimax_m3", "MiniMaxM3"),
    "Dots1ForCausalLM": ("dots1", "Dots1"),
    "Dots3NoteForCausalLM": ("dots3_note", "Dots3Note"),
    "Ministral3ForCausalLM": ("ministral3", "Ministral3"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "Glm4MoeLite"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "GlmMoeDsa"),
    "ExaoneMoeForCausalLM": ("exaone_moe", "ExaoneMoe"),
    "ExaoneMoEForCausalLM": ("exaone_moe", "ExaoneMoe"),
    "GraniteMoeForCausalLM": ("granitemoe", "GraniteMoe"),
    "GraniteMoeSharedForCausalLM": ("granitemoe", "GraniteMoe"),
    "FlexOlmoForCausalLM": ("flex_olmo", "FlexOlmo"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan", "HunYuan"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_moe", "HunYuanMoe"),
    "OPTForCausalLM": ("opt", "Opt"),
    "GPTJForCausalLM": ("gptj", "GptJ"),
    "CodeGenForCausalLM": ("codegen", "CodeGen"),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", "GptBigCode"),
    "MptForCausalLM": ("mpt", "Mpt"),
    "MPTForCausalLM": ("mpt", "Mpt"),
    "PhimoeForCausalLM": ("phimoe", "PhiMoe"),
    "PhiMoEForCausalLM": ("phimoe", "PhiMoe"),
    "DbrxForCausalLM": ("dbrx", "Dbrx"),
    "ApertusForCausalLM": ("apertus", "Apertus"),
    "GraniteMoeHybridForCausalLM": ("granite4", "Granite4"),
    "HeliumForCausalLM": ("helium", "Helium"),
    "VaultGemmaForCausalLM": ("vaultgemma", "VaultGemma"),
    "PersimmonForCausalLM": ("persimmon", "Persimmon"),
    "XGLMForCausalLM": ("xglm", "Xglm"),
    "Llama4ForCausalLM": ("llama4", "Llama4"),
    "GPTNeoForCausalLM": ("gpt_neo", "GptNeo"),
    "CwmForCausalLM": ("cwm", "Cwm"),
    "SolarOpenForCausalLM": ("solar_open", "SolarOpen"),
    "NanoChatForCausalLM": ("nanochat", "NanoChat"),
    "HyperCLOVAXForCausalLM": ("hyperclovax", "HyperClovaX"),
    "Jais2ForCausalLM": ("jais2", "Jais2"),
    "YoutuForCausalLM": ("youtu", "Youtu"),
    "MellumForCausalLM": ("mellum", "Mellum"),
    "AfmoeForCausalLM": ("afmoe", "Afmoe"),
    "MiniCPM3ForCausalLM": ("minicpm3", "MiniCpm3"),
    "Mistral4ForCausalLM": ("mistral4", "Mistral4"),
    "HYV3ForCausalLM": ("hy_v3", "HyV3"),
    "HYV4ForCausalLM": ("hy_v4", "HyV4"),
    "AXK1ForCausalLM": ("axk1", "AxK1"),
    "AXK2ForCausalLM": ("axk2", "AxK2"),
    "GraniteSWAForCausalLM": ("granite_swa", "GraniteSwa"),
    "GraniteMoeSWAForCausalLM": ("granite_swa", "GraniteMoeSwa"),
    "BioGptForCausalLM": ("biogpt", "BioGpt"),
    "GPTNeoXJapaneseForCausalLM": ("gpt_neox_japanese", "GptNeoXJapanese"),
    "AriaTextForCausalLM": ("aria", "Aria"),
    "MllamaForCausalLM": ("mllama", "Mllama"),
    "CohereCompassForCausalLM": ("cohere_compass", "CohereCompass"),
    "MistralLarge4ForConditionalGeneration": ("mistral_large4", "MistralLarge4"),
    "ChameleonForConditionalGeneration": ("chameleon", "Chameleon"),
    "Emu3ForCausalLM": ("emu3", "Emu3"),
    "LongcatFlashForCausalLM": ("longcat_flash", "LongcatFlash"),
    "Kolibri1ForCausalLM": ("kolibri1", "Kolibri1"),
    "FlintForCausalLM": ("flint", "Flint"),
    "LagunaForCausalLM": ("laguna", "Laguna"),
    "OpenAIGPTLMHeadModel": ("openai_gpt", "OpenAiGpt"),
    "JetMoeForCausalLM": ("jetmoe", "JetMoe"),
    "DiffLlamaForCausalLM": ("diffllama", "DiffLlama"),
    "BitNetForCausalLM": ("bitnet", "BitNet"),
    "Step3p5ForCausalLM": ("step3p5", "Step3p5"),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", "MiMoV2Flash"),
    "BeamForCausalLM": ("beam", "Beam"),
    "ModernBertDecoderForCausalLM": ("modernbert_decoder", "ModernBertDecoder"),
    "DogeForCausalLM": ("doge", "Doge"),
    "HrmTextForCausalLM": ("hrm_text", "HrmText"),
    "CTRLLMHeadModel": ("ctrl", "Ctrl"),
    # transformers does not have these.
    "MiniMaxText01ForCausalLM": ("minimax", "MiniMaxText01"),
    "MiniMaxM1ForCausalLM": ("minimax", "MiniMaxText01"),
    "InternLM2ForCausalLM": ("internlm2", "InternLm2"),
    "InternLM3ForCausalLM": ("internlm3", "InternLm3"),
    "InternLMForCausalLM": ("internlm", "InternLm"),
    "ExaoneForCausalLM": ("exaone", "Exaone"),
    "OrionForCausalLM": ("orion", "Orion"),
    "MiMoForCausalLM": ("qwen2", "Qwen2"),
    "LLaMAForCausalLM": ("llama", "Llama"),
    "XverseForCausalLM": ("llama", "Llama"),
    "IQuestCoderForCausalLM": ("iquest_coder", "IQuestCoder"),
    "StableLMEpochForCausalLM": ("stablelm", "StableLmEpoch"),
    "AquilaForCausalLM": ("llama", "Llama"),
    "AquilaModel": ("llama", "Llama"),
    "PanguEmbeddedForCausalLM": ("pangu_embedded", "PanguEmbedded"),
    "ChatGLMModel": ("chatglm", "ChatGlm"),
    "ChatGLMForConditionalGeneration": ("chatglm", "ChatGlm"),
    "BaichuanForCausalLM": ("baichuan", "Baichuan"),
    "BaiChuanForCausalLM": ("baichuan", "Baichuan"),
    "MiniCPMForCausalLM": ("minicpm", "MiniCpm"),
    "DeepseekForCausalLM": ("deepseek", "Deepseek"),
    "BailingMoeForCausalLM": ("bailing_moe", "Bailing"),
    "BailingMoeV2ForCausalLM": ("bailing_moe", "BailingV2"),
    "SarvamMoEForCausalLM": ("bailing_moe", "SarvamMoe"),
    "SarvamMLAForCausalLM": ("sarvam_mla", "SarvamMla"),
    "Param2MoEForCausalLM": ("bailing_moe", "Param2Moe"),
    "TelechatForCausalLM": ("telechat", "Telechat"),
    "TeleChatForCausalLM": ("telechat", "Telechat"),
    "Telechat3ForCausalLM": ("telechat3", "Telechat3"),
    "TeleChat3ForCausalLM": ("telechat3", "Telechat3"),
    "Telechat2ForCausalLM": ("telechat", "Telechat"),
    "TeleFLMForCausalLM": ("teleflm", "TeleFlm"),
    "TeleChat2ForCausalLM": ("telechat", "Telechat"),
    "DeciLMForCausalLM": ("decilm", "DeciLm"),
    "OuroForCausalLM": ("ouro", "Ouro"),
    "Step3TextForCausalLM": ("step3", "Step3"),
    "ArcticForCausalLM": ("arctic", "Arctic"),
    "Plamo3ForCausalLM": ("plamo3", "Plamo3"),
    "JAISLMHeadModel": ("jais", "Jais"),
    "MolmoForCausalLM": ("molmo", "Molmo"),
    # The text parts of larger models, which have no architecture of their own.
    "Phi3VTextModel": ("phi3", "Phi3V"),
    "Phi4MmTextModel": ("phi3", "Phi4Mm"),
    "Qwen3VLMoeTextModel": ("qwen3_vl_moe", "Qwen3VlMoe"),
    "Glm4vTextModel": ("glm4v", "Glm4v"),
    "Glm4vMoeTextModel": ("glm4v", "Glm4vMoe"),
    "GlmOcrTextModel": ("glm4v", "GlmOcr"),
    "PaddleOCRTextModel": ("ernie4_5", "PaddleOcr"),
    "DeepseekOcr2TextModel": ("deepseek_ocr2", "DeepseekOcr2"),
    "Ernie4_5_VLMoeTextModel": ("ernie4_5_vl", "Ernie45Vl"),
    "Molmo2TextModel": ("molmo2", "Molmo2"),
    "MuseGlimmerTextModel": ("muse_glimmer", "MuseGlimmer"),
    "MuseSparkTextModel": ("muse_spark", "MuseSpark"),
    "Glm5NextTextModel": ("glm5_next", "Glm5Next"),
}


SERVED = (*MODELS, *TEXT_PARTS, *CHOSEN_TEXT_PARTS)


def model_class(architecture: str) -> type[Model]:
    """Return the class that serves an architecture, as ModelConfig has it. Raises ConfigError if there is none."""
    whole, _, named = architecture.partition("/")
    if inside := named or TEXT_PARTS.get(whole):
        return text_part(model_class(inside))
    if architecture not in MODELS:
        nearest = max(SERVED, key=lambda served: _letters_in_common(served, architecture))
        # Names of one family begin with the same letters, such as Phi, GPT or Qwen.
        related = _letters_in_common(nearest, architecture) >= 3
        hint = f", whose nearest relative by name is {nearest}" if related else ""
        raise ConfigError(f"unknown architecture {architecture}{hint}; Baton serves {', '.join(SERVED)}")
    module, name = MODELS[architecture]
    return cast(type[Model], getattr(import_module(f".{module}", __package__), name))


def family_of(architecture: str) -> str:
    """Return the module and the class of the family that serves an architecture, as ModelConfig has it."""
    whole, _, named = architecture.partition("/")
    return ".".join(MODELS[named or TEXT_PARTS.get(whole, whole)])


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a Hugging Face model folder. Raises ConfigError for a model that cannot be served."""
    return _parse(ConfigFile.read(folder))


def parse_model_config(fields: dict[str, Any]) -> ModelConfig:
    """Return the config from the contents of a config.json, as load_model_config does from the file."""
    return _parse(ConfigFile(fields))


def _parse(file: ConfigFile) -> ModelConfig:
    if (choose := CHOSEN_TEXT_PARTS.get(file.architecture)) is not None:
        # The architecture of a config says which class serves it.
        architecture = f"{file.architecture}/{choose(file)}"
        file = ConfigFile({**file.fields, "architectures": [architecture]})
    return model_class(file.architecture).read_config(file)


def _letters_in_common(one: str, other: str) -> int:
    """Return with how many of the same letters two names begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
