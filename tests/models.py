"""Tiny random-weight model folders as transformers writes them, and what transformers itself generates from them."""

from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The families whose config.json has the fields of Llama's.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Configuration and model of transformers.
_CLASSES = {
    **{family: (f"{name}Config", f"{name}ForCausalLM") for family, name in FAMILIES.items()},
    "bloom": ("BloomConfig", "BloomForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_small": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "falcon": ("FalconConfig", "FalconForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "glm": ("GlmConfig", "GlmForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "olmo": ("OlmoConfig", "OlmoForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "cohere": ("CohereConfig", "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "cohere2_moe": ("Cohere2MoeConfig", "Cohere2MoeForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM"),
    "arcee": ("ArceeConfig", "ArceeForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "ministral": ("MinistralConfig", "MinistralForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "minimax_m3_text": ("MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM"),
    "minimax_m3": ("MiniMaxM3VLConfig", "MiniMaxM3SparseForConditionalGeneration"),
    "dots3_note_text": ("Dots3NoteTextConfig", "Dots3NoteForCausalLM"),
    "dots3_note": ("Dots3NoteConfig", "Dots3NoteForConditionalGeneration"),
    "dots1": ("Dots1Config", "Dots1ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "exaone_moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
    "flex_olmo": ("FlexOlmoConfig", "FlexOlmoForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "gptj": ("GPTJConfig", "GPTJForCausalLM"),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM"),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM"),
    "mpt": ("MptConfig", "MptForCausalLM"),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM"),
    "dbrx": ("DbrxConfig", "DbrxForCausalLM"),
    "apertus": ("ApertusConfig", "ApertusForCausalLM"),
    "helium": ("HeliumConfig", "HeliumForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "jamba": ("JambaConfig", "JambaForCausalLM"),
    "mamba": ("MambaConfig", "MambaForCausalLM"),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM"),
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "minicpmv4_6": ("MiniCPMV4_6Config", "MiniCPMV4_6ForConditionalGeneration"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "vaultgemma": ("VaultGemmaConfig", "VaultGemmaForCausalLM"),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM"),
    "xglm": ("XGLMConfig", "XGLMForCausalLM"),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM"),
    "cwm": ("CwmConfig", "CwmForCausalLM"),
    "solar_open": ("SolarOpenConfig", "SolarOpenForCausalLM"),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM"),
    "hyperclovax": ("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM"),
    "jais2": ("Jais2Config", "Jais2ForCausalLM"),
    "youtu": ("YoutuConfig", "YoutuForCausalLM"),
    "mellum": ("MellumConfig", "MellumForCausalLM"),
    "afmoe": ("AfmoeConfig", "AfmoeForCausalLM"),
    "beam": ("BeamConfig", "BeamForCausalLM"),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM"),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "axk1": ("AXK1Config", "AXK1ForCausalLM"),
    "axk2": ("AXK2Config", "AXK2ForCausalLM"),
    "granite_swa": ("GraniteSWAConfig", "GraniteSWAForCausalLM"),
    "granitemoe_swa": ("GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM"),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM"),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM"),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM"),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "llama4_mm": ("Llama4Config", "Llama4ForConditionalGeneration"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "kimi_k25": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration"),
    "gemma3_mm": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "gemma4_mm": ("Gemma4Config", "Gemma4ForConditionalGeneration"),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration"),
    "internvl": ("InternVLConfig", "InternVLForConditionalGeneration"),
    "aya_vision": ("AyaVisionConfig", "AyaVisionForConditionalGeneration"),
    "lfm2_vl": ("Lfm2VlConfig", "Lfm2VlForConditionalGeneration"),
    "lfm3_vl": ("Lfm3VlConfig", "Lfm3VlForConditionalGeneration"),
    "idefics3": ("Idefics3Config", "Idefics3ForConditionalGeneration"),
    "glm5_next": ("Glm5NextConfig", "Glm5NextForConditionalGeneration"),
    "glm4v": ("Glm4vConfig", "Glm4vForConditionalGeneration"),
    "glm4v_moe": ("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration"),
    "voxtral": ("VoxtralConfig", "VoxtralForConditionalGeneration"),
    "qwen2_omni": ("Qwen2_5OmniThinkerConfig", "Qwen2_5OmniThinkerForConditionalGeneration"),
    "qwen3_omni": ("Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    "glm_ocr": ("GlmOcrConfig", "GlmOcrForConditionalGeneration"),
    "hunyuan_vl": ("HunYuanVLConfig", "HunYuanVLForConditionalGeneration"),
    "paddleocr_vl": ("PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration"),
    "got_ocr2": ("GotOcr2Config", "GotOcr2ForConditionalGeneration"),
    "lighton_ocr": ("LightOnOcrConfig", "LightOnOcrForConditionalGeneration"),
    "fast_vlm": ("FastVlmConfig", "FastVlmForConditionalGeneration"),
    "granite4_vision": ("Granite4VisionConfig", "Granite4VisionForConditionalGeneration"),
    "aria_text": ("AriaTextConfig", "AriaTextForCausalLM"),
    "kolibri1": ("Kolibri1Config", "Kolibri1ForCausalLM"),
    "flint": ("FlintConfig", "FlintForCausalLM"),
    "laguna": ("LagunaConfig", "LagunaForCausalLM"),
    "mimo_v2_flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    "longcat_flash": ("LongcatFlashConfig", "LongcatFlashForCausalLM"),
    "aria": ("AriaConfig", "AriaForConditionalGeneration"),
    "perception_lm": ("PerceptionLMConfig", "PerceptionLMForConditionalGeneration"),
    "video_llama3": ("VideoLlama3Config", "VideoLlama3ForConditionalGeneration"),
    "janus": ("JanusConfig", "JanusForConditionalGeneration"),
    "deepseek_vl": ("DeepseekVLConfig", "DeepseekVLForConditionalGeneration"),
    "deepseek_vl_hybrid": ("DeepseekVLHybridConfig", "DeepseekVLHybridForConditionalGeneration"),
    "hyperclovax_vision": ("HyperCLOVAXVisionV2Config", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    "qianfan_ocr": ("QianfanOCRConfig", "QianfanOCRForConditionalGeneration"),
    "granite_docling": ("GraniteDoclingConfig", "GraniteDoclingForConditionalGeneration"),
    "deepseek_ocr2": ("DeepseekOcr2Config", "DeepseekOcr2ForConditionalGeneration"),
    "ernie4_5_vl": ("Ernie4_5_VLMoeConfig", "Ernie4_5_VLMoeForConditionalGeneration"),
    "molmo2": ("Molmo2Config", "Molmo2ForConditionalGeneration"),
    "muse_glimmer": ("MuseGlimmerConfig", "MuseGlimmerForConditionalGeneration"),
    "mistral_large4": ("MistralLarge4Config", "MistralLarge4ForConditionalGeneration"),
    "muse_spark": ("MuseSparkConfig", "MuseSparkForConditionalGeneration"),
    "phi4_multimodal": ("Phi4MultimodalConfig", "Phi4MultimodalForCausalLM"),
    "mllama_text": ("MllamaTextConfig", "MllamaForCausalLM"),
    "mllama": ("MllamaConfig", "MllamaForConditionalGeneration"),
    "cohere_compass_text": ("CohereCompassTextConfig", "CohereCompassForCausalLM"),
    "cohere_compass": ("CohereCompassConfig", "CohereCompassForConditionalGeneration"),
    "chameleon": ("ChameleonConfig", "ChameleonForConditionalGeneration"),
    "emu3_text": ("Emu3TextConfig", "Emu3ForCausalLM"),
    "emu3": ("Emu3Config", "Emu3ForConditionalGeneration"),
    "openai_gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel"),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM"),
    "diffllama": ("DiffLlamaConfig", "DiffLlamaForCausalLM"),
    "bitnet": ("BitNetConfig", "BitNetForCausalLM"),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel"),
    "doge": ("DogeConfig", "DogeForCausalLM"),
    "hrm_text": ("HrmTextConfig", "HrmTextForCausalLM"),
    "modernbert_decoder": ("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM"),
    "fuyu": ("FuyuConfig", "FuyuForCausalLM"),
    "step3p7": ("Step3p7Config", "Step3p7ForConditionalGeneration"),
}
# The vision part of models whose text part is served.
_VISION: dict[str, dict[str, Any]] = {
    "gemma3_mm": {"hidden_size": 32, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
    "gemma4_mm": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
    "mistral3": {"model_type": "pixtral", "hidden_size": 32, "num_attention_heads": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_vl": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "llama4_mm": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "image_size": 28,
    },
    "kimi_k25": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
}
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_TOWER = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14,
}  # fmt: skip
_VISION["llava"] = {**_TOWER, "model_type": "clip_vision_model", "image_size": 28}
_VISION["internvl"] = {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]}
_VISION["aya_vision"] = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 28}
_VISION["idefics3"] = {**_TOWER, "image_size": 28}
_VISION["lfm2_vl"] = _VISION["lfm3_vl"] = {**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 4}
_VISION["paddleocr_vl"] = _VISION["hunyuan_vl"] = _TOWER
_VISION["lighton_ocr"] = {**_TOWER, "model_type": "pixtral"}
_VISION["got_ocr2"] = {**_TOWER, "image_size": 56, "output_channels": 8, "mlp_dim": 64, "global_attn_indexes": [0]}
# Those of the published models are from a library that is not installed.
_VISION["fast_vlm"] = _VISION["llava"]
_VISION["perception_lm"] = {**_VISION["llava"], "model_args": {"embed_dim": 32}}
_VISION["granite4_vision"] = {**_VISION["llava"], "hidden_size": 64}
_VISION["glm4v"] = _VISION["glm4v_moe"] = _VISION["glm_ocr"] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64, "image_size": 28,
}  # fmt: skip
_VISION["glm5_next"] = {**_VISION["glm4v"], "projection_intermediate_size": 64}
_VISION["qwen2_omni"] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64}
_VISION["qwen3_omni"] = {**_VISION["qwen2_omni"], "deepstack_visual_indexes": [0]}
_VISION["aria"] = _VISION["idefics3"]
_VISION["minicpmv4_6"] = {**_TOWER, "image_size": 56}
_VISION["qwen3_5"] = _VISION["qwen3_5_moe"] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64,
}  # fmt: skip
_VISION["video_llama3"] = _TOWER
_VISION["janus"] = {**_TOWER, "image_size": 28, "projection_dim": 64, "num_image_tokens": 4}
_VISION["deepseek_vl"] = {**_TOWER, "image_size": 28}
_VISION["deepseek_vl_hybrid"] = {**_TOWER, "image_size": 28}
_VISION["hyperclovax_vision"] = _VISION["qwen2_5_vl"]
_VISION["qianfan_ocr"] = _VISION["internvl"]
_VISION["granite_docling"] = {**_TOWER, "image_size": 56, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
_VISION["deepseek_ocr2"] = {
    "encoder_config": {**_TOWER, "num_key_value_heads": 2},
    "sam_config": {**_TOWER, "image_size": 56, "output_channels": 8, "mlp_dim": 64, "global_attn_indexes": [0]},
}
_VISION["ernie4_5_vl"] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
_VISION["molmo2"] = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "image_size": [28, 28]}
_VISION["mistral_large4"] = {**_TOWER, "image_size": 56}
_VISION["muse_glimmer"] = _VISION["muse_spark"] = _TOWER
_VISION["mllama"] = {
    "num_hidden_layers": 1, "num_global_layers": 1, "hidden_size": 32, "attention_heads": 2, "intermediate_size": 64,
    "image_size": 28, "vision_output_dim": 64, "intermediate_layers_indices": [0],
}  # fmt: skip
_VISION["cohere_compass"] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_VISION["step3p7"] = _VISION["minimax_m3"] = {**_TOWER, "image_size": 28}
_VISION["phi4_multimodal"] = {**_TOWER, "image_size": 28, "crop_size": 28}
_VISION["dots3_note"] = {**_TOWER, "mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 64}
_AUDIO: dict[str, dict[str, Any]] = {
    "voxtral": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128},
    "qwen2_omni": {
        "encoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 64,
    },
}  # fmt: skip
_AUDIO["phi4_multimodal"] = {
    "num_blocks": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "nemo_conv_channels": 32,
}  # fmt: skip
_AUDIO["dots3_note"] = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "feature_size": 16,
    "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 64,
}  # fmt: skip
_AUDIO["muse_spark"] = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "out_hidden_size": 64}
_AUDIO["qwen3_omni"] = {**_AUDIO["qwen2_omni"], "downsample_hidden_size": 16}
_TEXT_OF = {
    "gemma3_mm": "gemma3",
    "gemma4_mm": "gemma4",
    "mistral3": "ministral3",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "kimi_k25": "deepseek_v3",
    "llama4_mm": "llama4",
    "qwen3_vl_moe": "qwen3_moe",
    "llava": "llama",
    "internvl": "qwen3_moe",
    "aya_vision": "cohere2",
    "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm3_vl": "lfm3",
    "idefics3": "llama",
    "glm4v": "glm4",
    "glm5_next": "glm5_next_text",
    "glm4v_moe": "glm4_moe",
    "voxtral": "llama",
    "qwen2_omni": "qwen2",
    "qwen3_omni": "qwen3_moe",
    "glm_ocr": "glm4",
    "hunyuan_vl": "hunyuan_v1_dense",
    "paddleocr_vl": "ernie4_5",
    "got_ocr2": "qwen2",
    "lighton_ocr": "qwen3",
    "fast_vlm": "qwen2",
    "granite4_vision": "granite",
    "aria": "aria_text",
    "perception_lm": "llama",
    "video_llama3": "qwen2",
    "janus": "llama",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "hyperclovax_vision": "hyperclovax",
    "qianfan_ocr": "qwen3",
    "granite_docling": "granite",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "ernie4_5_vl": "ernie4_5_vl_text",
    "molmo2": "molmo2_text",
    "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text",
    "mistral_large4": "mistral_large4_text",
    "mllama": "mllama_text",
    "cohere_compass": "cohere_compass_text",
    "emu3": "emu3_text",
    "fuyu": "persimmon",
    "step3p7": "step3p5",
    "minimax_m3": "minimax_m3_text",
    "dots3_note": "dots3_note_text",
}
# The text parts of these are of a family that their config.json names.
_NAMED = (
    "mistral3", "llava", "internvl", "aya_vision", "idefics3", "voxtral", "got_ocr2", "lighton_ocr", "fast_vlm",
    "lfm2_vl", "lfm3_vl", "minicpmv4_6",
    "perception_lm", "video_llama3", "janus", "deepseek_vl", "deepseek_vl_hybrid", "hyperclovax_vision", "qianfan_ocr",
    "fuyu",
)  # fmt: skip
# What these have beside their parts.
_WHOLE: dict[str, dict[str, Any]] = {
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 32}},
    "deepseek_vl_hybrid": {"high_res_vision_config": _VISION["got_ocr2"]},
    "molmo2": {"adapter_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "text_hidden_size": 64}},
}
_WHOLE["emu3"] = {
    "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "hidden_size": 32},
    "vocabulary_map": {"<image>": 300, "<|visual token 000000|>": 301, "<|extra_200|>": 302},
}  # fmt: skip
_WHOLE["molmo2"]["adapter_config"]["vision_feature_layer"] = [0]
VOCAB_SIZE = 512
# In fresh models of these kinds, the decays of states are the same in all channels.
_EVEN_DECAYS = ("jamba", "mamba", "mamba2", "falcon_mamba", "zamba2", "glm5_next_text")
_REFERENCE = "reference"  # folder, in that of a model, of the model that transformers computes in its place
# File in that folder: after how many layers each, before the next one, the reference has its last norm, too.
NORMED_LAYERS = "normed_layers"
# Of logits in float32: a token so little behind the best is as right, because the batch decides how sums are rounded.
NEAR_TIE = 1e-4
BEGIN, END = "<|begin|>", "<|end|>"

# Original context 64 of 512, so that prompts of a few blocks reach beyond it.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
}

# Weights this wide keep greedy decoding from settling on one token, and the two best logits some 1e-3 apart.
INITIALIZER_RANGE = 0.35

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The baton passes from hand to hand.",
    "Hello world, hello there! How are you today? Numbers: 0 1 2 3 4 5 6 7 8 9.",
    "def main():\n    return 'code'\n",
]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(
    folder: Path, family: str, *, rope: str = "default", seed: int = 0, shard_size: str | None = None, **overrides: Any
) -> Path:
    """Write a model of a family with a tokenizer into `folder`, and return the folder.

    family: one of _CLASSES, or one of RENAMED, which transformers lacks. rope: a key of ROPES; without effect where the
    family has no rope. shard_size: largest safetensors file, as "100KB"; None = one file. overrides: fields of the
    family's configuration class.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from .renamed import RENAMED

    if family in RENAMED:
        RENAMED[family](folder, partial(make_model, folder / _REFERENCE, rope=rope, seed=seed), overrides)
        make_tokenizer().save_pretrained(folder)
        return folder

    kind = _TEXT_OF.get(family, family)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": dict(ROPES[rope]),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if kind == "bloom":
        fields |= {"n_head": fields.pop("num_attention_heads"), "n_layer": fields.pop("num_hidden_layers")}
        fields["seq_length"] = fields.pop("max_position_embeddings")
    if kind in ("gpt2", "gptj", "codegen", "gpt_bigcode", "openai_gpt", "ctrl"):
        fields |= {"n_embd": fields.pop("hidden_size"), "n_layer": fields.pop("num_hidden_layers")}
        fields |= {"n_head": fields.pop("num_attention_heads"), "n_positions": fields.pop("max_position_embeddings")}
    if kind == "ctrl":
        fields["dff"] = fields.pop("intermediate_size")
    if kind in ("gptj", "codegen"):
        fields["rotary_dim"] = 8
    if kind == "phimoe":
        fields |= {"num_local_experts": 6, "pad_token_id": None, "router_jitter_noise": 0.2}
    if kind == "dbrx":
        fields["d_model"] = fields.pop("hidden_size")
        fields["attn_config"] = {"kv_n_heads": fields.pop("num_key_value_heads"), "clip_qkv": 1.5, "rope_theta": 1e4}
        fields["ffn_config"] = {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2}
    if kind in ("lfm2", "lfm2_moe"):
        fields |= {"num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
        fields["pad_token_id"] = None
    if kind == "granitemoehybrid":
        fields |= {"layer_types": ["full_attention"] * 2, "shared_intermediate_size": 96}
        fields |= {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    if kind in ("bamba", "falcon_h1", "granitemoehybrid"):
        fields |= {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_expand": 1}
    if kind == "jamba":
        fields |= {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6}
        fields |= {"mamba_d_state": 8, "mamba_dt_rank": 5, "pad_token_id": None}
        del fields["rope_parameters"]
    if kind == "mamba2":
        fields |= {"num_heads": 8, "head_dim": 16, "n_groups": 2}
        del fields["intermediate_size"]
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        fields |= {"num_hidden_layers": 3, "state_size": 8, "time_step_rank": 5, "pad_token_id": None}
        for name in ("rope_parameters", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            del fields[name]
    if kind == "recurrent_gemma":
        # The square root of the hidden size, which scales embeddings, is not a number of bfloat16.
        fields |= {"num_hidden_layers": 5, "hidden_size": 80, "lru_width": 96, "attention_window_size": 19}
        fields |= {"num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 192, "pad_token_id": None}
    if kind == "nemotron_h":
        fields |= {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 8, "head_dim": 16}
        fields |= {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "mlp"]}
        fields |= {"n_routed_experts": 8, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56}
        del fields["num_hidden_layers"], fields["rope_parameters"]
    if kind == "falcon_h1":
        fields |= {"mamba_d_ssm": 96, "pad_token_id": None, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5}
        fields |= {"key_multiplier": 0.4, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.7}
        fields |= {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.8, 0.5]}
        fields["ssm_multipliers"] = [0.5, 1.5, 0.75, 1.25, 0.9]
    if kind == "zamba2":
        kinds = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]
        fields |= {"num_hidden_layers": 5, "layers_block_type": kinds, "num_mem_blocks": 2, "adapter_rank": 8}
        # No number of heads divides the other.
        fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "n_mamba_heads": 12, "mamba_expand": 3}
        # transformers bounds the steps of a prompt, but not those of the tokens that it generates.
        fields |= {"mamba_d_state": 16, "pad_token_id": None, "time_step_min": 1e-9, "initializer_range": 0.15}
    if kind == "olmo_hybrid":
        fields |= {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
        # transformers divides the filters of the convolution into equal parts when it saves them.
        fields |= {"linear_key_head_dim": 12, "linear_value_head_dim": 12, "pad_token_id": None}
    if kind == "minimax":
        fields |= {"num_hidden_layers": 4, "num_local_experts": 6, "block_size": 5, "head_dim": 12}
        fields |= {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.3}
        fields |= {"linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.8, "mlp_beta_factor": 1.0}
    if kind in ("kimi_linear", "bailing_hybrid"):
        fields |= {"num_hidden_layers": 5, "num_key_value_heads": 4, "moe_intermediate_size": 24, "pad_token_id": None}
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "kv_lora_rank": 16}
        fields |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
        fields["layer_types"] = ["linear_attention", "linear_attention", "full_attention"] * 2
        del fields["layer_types"][-1]
    if kind == "kimi_linear":
        fields |= {"linear_num_heads": 3, "linear_head_dim": 8}
        del fields["rope_parameters"]
    if kind == "bailing_hybrid":
        fields |= {"head_dim": 8, "first_k_dense_replace": 1}
    if kind == "bamba":
        fields |= {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "pad_token_id": None}
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        fields |= {"num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2}
        fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        fields |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    if kind in ("qwen3_next", "qwen3_5_moe_text"):
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        fields["shared_expert_intermediate_size"] = 40
    if kind == "lfm3":
        fields |= {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 19, "pad_token_id": None}
        del fields["rope_parameters"]
    if kind == "lfm2":
        fields |= {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.1}
    if kind == "lfm2_moe":
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
    if kind in ("helium", "vaultgemma"):
        fields["head_dim"] = 16
    if kind == "xglm":
        fields |= {"d_model": fields.pop("hidden_size"), "num_layers": fields.pop("num_hidden_layers")}
        fields |= {"attention_heads": fields.pop("num_attention_heads"), "ffn_dim": fields.pop("intermediate_size")}
        fields["init_std"] = INITIALIZER_RANGE
    if kind == "llama4":
        fields |= {"head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 96, "num_local_experts": 6}
        fields |= {"num_hidden_layers": 4, "attention_chunk_size": 24, "floor_scale": 20, "attn_scale": 0.5}
    if kind in ("cwm", "solar_open", "mellum", "afmoe", "hy_v3", "kolibri1", "flint", "laguna"):
        fields |= {"head_dim": 16, "num_hidden_layers": 4, "pad_token_id": None}
    if kind == "step3p5":
        fields |= {"head_dim": 16, "num_hidden_layers": 4, "num_sliding_attention_heads": 8, "share_expert_dim": 56}
        fields["mlp_layer_types"] = ["dense", *("sparse",) * 3]
        fields |= {"swiglu_limits": [0, 0, 1, 2], "swiglu_limits_shared": [1, 0, 0, 2]}
    if kind == "beam":
        fields |= {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 19, "num_experts": 8}
        fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        fields["layer_types"] = ["full_attention", *("sliding_attention",) * 2, "full_attention"]
        fields["mlp_layer_types"] = ["dense", *("sparse",) * 3]
        fields["rope_parameters"] = {"sliding_attention": ROPES[rope], "full_attention": None}
    if kind in ("granite_swa", "granitemoe_swa"):
        fields |= {"num_hidden_layers": 4, "pad_token_id": None}
    if kind in ("cwm", "mellum", "afmoe", "granite_swa", "granitemoe_swa", "kolibri1", "flint", "laguna", "step3p5"):
        fields["sliding_window"] = 19
    if kind in ("solar_open", "mellum", "afmoe", "hy_v3", "kolibri1", "flint", "laguna", "step3p5"):
        fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
        fields["n_routed_experts" if kind in ("solar_open", "step3p5") else "num_experts"] = 6
    if kind in ("mellum", "laguna", "step3p5"):
        fields["layer_types"] = ["full_attention", "sliding_attention"] * 2
        fields["rope_parameters"] = {"full_attention": ROPES[rope], "sliding_attention": ROPES["default"]}
    if kind in ("laguna", "step3p5"):
        fields["rope_parameters"]["full_attention"] = {**ROPES[rope], "partial_rotary_factor": 0.5}
    if kind == "laguna":
        fields["num_attention_heads_per_layer"] = [4, 8, 8, 4]
    if kind == "kolibri1":
        # The default puts the first layer without a window after four others.
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if kind == "flint":
        fields |= {"num_hidden_layers": 5, "mlp_only_layers": [1]}
    if kind in ("kolibri1", "flint", "laguna"):
        fields["shared_expert_intermediate_size"] = 56
    if kind == "mimo_v2_flash":
        # A third of each head is rotated, and layers with a window have twice as many key-value heads.
        fields |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
        fields |= {"head_dim": 24, "v_head_dim": 16}
        fields |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "sliding_window": 19}
        fields["layer_types"] = ["full_attention", "sliding_attention"] * 2
        ropes = {"full_attention": ROPES[rope], "sliding_attention": ROPES["default"]}
        fields["rope_parameters"] = {name: {**each, "partial_rotary_factor": 0.334} for name, each in ropes.items()}
    if kind == "gpt_neo":
        fields |= {"num_layers": fields.pop("num_hidden_layers"), "num_heads": fields.pop("num_attention_heads")}
        fields |= {"attention_types": [[["global", "local"], 1]], "window_size": 19}
    if kind == "opt":
        fields |= {"ffn_dim": fields.pop("intermediate_size"), "init_std": INITIALIZER_RANGE}
    if kind == "mpt":
        fields |= {"d_model": fields.pop("hidden_size"), "n_layers": fields.pop("num_hidden_layers")}
        fields |= {"n_heads": fields.pop("num_attention_heads"), "max_seq_len": fields.pop("max_position_embeddings")}
    if kind == "gemma3":
        fields |= {"num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 19}
        fields["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
        ropes = {"full_attention": {**ROPES[rope], "rope_theta": 1e6}, "sliding_attention": ROPES["default"]}
        fields["rope_parameters"] = ropes
    if kind == "gemma3n":
        fields |= {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "head_dim": 16, "sliding_window": 19}
        fields |= {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 500, "laurel_rank": 8}
        fields |= {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.5, 0.0], "final_logit_softcapping": 8.0}
        fields["layer_types"] = ["full_attention", *("sliding_attention",) * 3, "full_attention"]
        ropes = {"full_attention": {**ROPES[rope], "rope_theta": 1e6}, "sliding_attention": ROPES["default"]}
        fields["rope_parameters"] = ropes
    if kind in ("gemma4", "gemma4_small", "gemma4_unified"):
        fields |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
        fields |= {"num_global_key_value_heads": 4, "global_head_dim": 32, "attention_k_eq_v": True}
        fields |= {"sliding_window": 19}
        fields |= {"final_logit_softcapping": 8.0}
        if kind == "gemma4":
            fields["hidden_size_per_layer_input"] = 0
        fields["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        fields["rope_parameters"] = {"full_attention": full, "sliding_attention": ROPES["default"]}
    if kind == "gemma4_small":
        fields |= {"num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        fields["layer_types"] = [*("sliding_attention", "full_attention") * 2, *fields["layer_types"]]
        fields |= {"num_key_value_heads": 2, "attention_k_eq_v": False}
        fields |= {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 512}
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe"):
        fields |= {"num_experts_per_tok": 2, "pad_token_id": None}
        fields["n_routed_experts" if kind == "glm4_moe" else "num_experts"] = 6
    if kind in ("qwen2_moe", "qwen3_moe"):
        fields |= {"moe_intermediate_size": 40, "decoder_sparse_step": 1}
    if kind == "gpt_oss":
        fields |= {"head_dim": 16, "sliding_window": 19, "num_hidden_layers": 3}
    if kind == "glm4_moe":
        fields |= {"moe_intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 32}
    if kind in ("glm", "glm4", "minimax_m2", "seed_oss", "ernie4_5", "ministral", "ministral3",
                "hunyuan_v1_dense", "hunyuan_v1_moe"):  # fmt: skip
        fields |= {"head_dim": 16, "pad_token_id": None}
    if kind == "ernie4_5_moe":
        fields |= {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40}
    if kind == "hunyuan_v1_moe":
        fields |= {"num_experts": 6, "moe_topk": 2}
    if kind == "minimax_m2":
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    if kind == "minimax_m3_text":
        # Of 4 blocks of 8 keys, 3 are selected by their scores.
        fields |= {"num_hidden_layers": 4, "head_dim": 16, "rotary_dim": 8, "index_head_dim": 16, "index_n_heads": 2}
        fields |= {"index_block_size": 8, "index_topk_blocks": 4, "pad_token_id": None}
        fields |= {"dense_intermediate_size": 96, "intermediate_size": 40, "shared_intermediate_size": 56}
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.5}
        fields["layer_types"] = ["full_attention", *("minimax_m3_sparse",) * 3]
        fields["mlp_layer_types"] = ["dense", *("sparse",) * 3]
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    if kind == "dots1":
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    if kind in ("olmo3", "cohere2", "cohere2_moe", "exaone4", "ministral"):
        fields |= {"num_hidden_layers": 4, "sliding_window": 19}
    if kind == "cohere2_moe":
        fields |= {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}
    if kind == "olmo3":
        ropes = {"full_attention": ROPES[rope], "sliding_attention": ROPES["default"]}
        fields["rope_parameters"] = ropes
    if kind in ("granitemoe", "granitemoeshared", "granitemoe_swa"):
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}
    if kind in ("exaone_moe", "flex_olmo"):
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None}
    if kind == "exaone_moe":
        fields |= {"moe_intermediate_size": 40, "num_hidden_layers": 4, "sliding_window": 19}
    if kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "youtu", "axk1",
                "axk2", "mistral4", "mistral_large4_text", "hy_v4", "minicpm3", "dots3_note_text"):  # fmt: skip
        fields |= {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        fields["v_head_dim"] = 12
        fields.pop("num_key_value_heads")
    if kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "axk1", "axk2",
                "mistral4", "mistral_large4_text", "hy_v4", "dots3_note_text"):  # fmt: skip
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        fields |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    if kind in ("glm4_moe_lite", "youtu", "axk1", "axk2", "mistral4", "minicpm3", "deepseek_v32", "glm_moe_dsa",
                "mistral_large4_text", "hy_v4", "dots3_note_text"):  # fmt: skip
        fields["num_key_value_heads"] = 4
    if kind in ("deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4_text", "hy_v4", "dots3_note_text"):
        # With few heads, many keys would have a score of 0, and transformers orders such keys in no way of its own.
        fields |= {"index_topk": 21, "index_n_heads": 16, "index_head_dim": 12}
    if kind == "hy_v4":
        fields["pad_token_id"] = None
    if kind == "dots3_note_text":
        # Layers with a window have more heads, whose queries are smaller and whose values are larger, and more latents.
        fields |= {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 19, "swa_num_attention_heads": 8}
        fields |= {"swa_num_key_value_heads": 8, "swa_q_lora_rank": 28, "swa_kv_lora_rank": 36, "swa_head_dim": 20}
        fields |= {"swa_qk_nope_head_dim": 12, "swa_v_head_dim": 16, "shared_experts_intermediate_size": 56}
        fields["layer_types"] = ["indexed_attention", "sliding_attention"] * 2
        fields["pad_token_id"] = None
        # transformers changes these objects.
        ropes = {"indexed_attention": {**ROPES[rope]}, "sliding_attention": {**ROPES["default"], "rope_theta": 500.0}}
        fields["rope_parameters"] = ropes
    if kind == "glm5_next_text":
        fields |= {"num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 40}
        fields |= {"qk_nope_head_dim": 16, "v_head_dim": 12, "linear_num_heads": 3, "linear_head_dim": 8}
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "pad_token_id": None}
        fields |= {"index_topk": 20, "index_kpool": 4, "index_n_heads": 16, "index_head_dim": 12}
        kinds = ["linear_attention", "indexed_attention"]
        fields["layer_types"] = [*kinds, kinds[1], *kinds]
        fields["indexer_types"] = ["full", "full", "shared", "full", "full"]
        fields["mlp_layer_types"] = ["dense", *("sparse",) * 4]
        del fields["rope_parameters"]
    if kind == "deepseek_v4":
        fields |= {"head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 24, "o_groups": 4, "o_lora_rank": 12}
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "pad_token_id": None}
        fields |= {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 5, "sliding_window": 8, "hc_mult": 3}
        fields |= {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_rate_hca": 16, "qk_rope_head_dim": 8}
        kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
        fields["layer_types"] = [*kinds]
        fields["rope_parameters"] = ROPES[rope]
    if kind == "mistral_large4_text":
        fields |= {"num_hidden_layers": 4, "no_rope_layer_interval": 2}
        fields.pop("q_lora_rank")
    if kind == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = 56
    if kind == "hrm_text":
        # With wider weights so many layers would turn rounding errors into other tokens.
        fields |= {"head_dim": 16, "embedding_scale": 1.5, "initializer_range": 0.15}
    if kind == "modernbert_decoder":
        fields |= {"num_hidden_layers": 4, "local_attention": 38, "pad_token_id": 2}
        fields["rope_parameters"] = {"full_attention": ROPES[rope], "sliding_attention": ROPES["default"]}
    if kind == "jetmoe":
        fields |= {"kv_channels": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}
        fields.pop("num_attention_heads")
    if kind == "aria_text":
        fields |= {"intermediate_size": 40, "moe_num_experts": 6, "pad_token_id": None}
    if kind == "longcat_flash":
        fields |= {"num_layers": fields.pop("num_hidden_layers"), "ffn_hidden_size": fields.pop("intermediate_size")}
        fields |= {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        fields |= {"v_head_dim": 12, "head_dim": 8, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3}
        fields |= {"expert_ffn_hidden_size": 40, "routed_scaling_factor": 2.0}
        fields.pop("num_key_value_heads")
    if kind == "deepseek_ocr2_text":
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        fields["mlp_layer_types"] = ["dense", "sparse"]
    if kind == "ernie4_5_vl_text":
        fields |= {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": [40, 24]}
        fields["rope_parameters"]["mrope_section"] = [3, 3, 2]
    if kind == "molmo2_text":
        # transformers writes the embedding in halves.
        fields |= {"head_dim": 16, "additional_vocab_size": VOCAB_SIZE}
    if kind == "muse_spark_text":
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_hidden_size": 48}
        fields["mlp_layer_types"] = ["sparse", "dense", *("sparse",) * 3]
    if kind in ("muse_glimmer_text", "muse_spark_text"):
        fields |= {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 19, "output_multiplier": 0.5}
    if kind == "mllama_text":
        fields |= {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": None}
    if kind == "cohere_compass_text":
        fields |= {"num_hidden_layers": 4, "sliding_window": 19, "logit_scale": 0.25}
        fields["layer_types"] = [*("sliding_attention",) * 3, "full_attention"]
        fields["rope_parameters"] = {"sliding_attention": {**ROPES[rope], "mrope_section": [4, 2, 2]}}
        fields["rope_parameters"]["full_attention"] = None
    if kind == "chameleon":
        names = {"<image>": 9, **{f"IMGIMG{id}Z": id for id in range(10, VOCAB_SIZE, 3)}}
        fields |= {"vocabulary_map": names, "vq_config": _WHOLE["janus"]["vq_config"]}
    if kind == "emu3_text":
        fields["pad_token_id"] = 2
    if kind == "phi4_multimodal":
        fields |= {"pad_token_id": None, "vision_config": _VISION[kind], "audio_config": _AUDIO[kind]}
    fields |= overrides
    if family in _TEXT_OF:
        text = {**fields, "model_type": kind} if family in _NAMED else fields
        parts = {"vision_config": _VISION.get(family), "audio_config": _AUDIO.get(family)}
        given = {name: part for name, part in parts.items() if part is not None}
        fields = {"text_config": text, **given, "tie_word_embeddings": False, **_WHOLE.get(family, {})}
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    config = config_class(**fields)
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        # Fresh biases are zero and fresh norms one: a model that lost either would give the same tokens.
        stored = ("correction_bias", "layer_scalar", "rotary_emb.alpha", "tid2eid")
        corrections = [entry for entry in model.named_buffers() if entry[0].endswith(stored)]
        for name, parameter in (*model.named_parameters(), *corrections):
            if name.endswith("bias"):
                parameter.normal_(std=INITIALIZER_RANGE)
            elif name.endswith(
                ("sinks", "alpha_p", "alpha_n", "rotary_emb.alpha", "hc.base", "hc_base", "kpool_compress_ape")
            ):
                parameter.normal_()
            elif name.endswith("tid2eid"):
                scores = torch.rand(len(parameter), model.config.n_routed_experts)
                parameter.copy_(scores.topk(parameter.shape[1]).indices)
            elif name.endswith(("self_attn.A", "z_L_init", "kpool_compress_gate")):
                parameter.normal_(std=INITIALIZER_RANGE)
            elif kind in _EVEN_DECAYS and name.endswith(("A_log", ".D")):
                parameter.uniform_(0.5, 1.5)
            elif kind == "recurrent_gemma" and parameter.dim() > 1:
                parameter.normal_(std=INITIALIZER_RANGE)  # this family has no initializer_range
            elif name.endswith("modality_router.weight"):
                parameter.normal_(std=8.0)  # its inputs are tiny
            elif "norm" in name or "ln_" in name or name.endswith(("layer_scalar", "scale", "_residual")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("router.gate.weight"):
                parameter.normal_(std=INITIALIZER_RANGE)
    model.save_pretrained(folder, max_shard_size=shard_size or "1GB")
    if family in ("kimi_k25", "qianfan_ocr"):
        # transformers writes the layers of the text part by the name that those of the vision part have.
        [path] = folder.glob("*.safetensors")
        written = "blocks" if family == "kimi_k25" else "encoder.layers"
        tensors = load_file(path)
        save_file({name.replace(f"language_model.model.{written}.", "language_model.model.layers."): tensor
                   for name, tensor in tensors.items()}, path, {"format": "pt"})  # fmt: skip
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a byte-level BPE tokenizer within VOCAB_SIZE, with a chat template; BEGIN has id 0, END id 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
    fast.chat_template = _CHAT_TEMPLATE
    return fast


@lru_cache(maxsize=4)
def reference_model(folder: Path) -> "PreTrainedModel":
    """Return transformers' own model of a folder, in float32."""
    import torch
    import transformers

    folder = folder / _REFERENCE if (folder / _REFERENCE).exists() else folder
    [name] = transformers.AutoConfig.from_pretrained(folder).architectures
    model: PreTrainedModel = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    if (folder / NORMED_LAYERS).exists():
        every, inside = int((folder / NORMED_LAYERS).read_text()), model.model
        for layer in inside.layers[every::every]:
            layer.register_forward_pre_hook(lambda _, inputs: (inside.norm(inputs[0]), *inputs[1:]))
    return model.eval()


def reference_greedy(folder: Path, prompt_ids: list[int], n: int) -> list[int]:
    """Return the n tokens that transformers picks greedily in float32 after a prompt; the end token ends nothing."""
    import torch

    model = reference_model(folder)
    tokens: list[int] = []
    past, step = None, prompt_ids
    # transformers asks a cache for the length of its attention.
    cached = set(getattr(model.config, "layer_types", None) or ()) != {"linear_attention"}
    with torch.inference_mode():
        for _ in range(n):
            output = model(torch.tensor([step]), past_key_values=past, use_cache=cached)
            past = output.past_key_values
            tokens.append(int(output.logits[0, -1].argmax()))
            # Some models begin no cache of their own.
            step = prompt_ids + tokens if past is None else tokens[-1:]
    return tokens


def reference_logits(folder: Path, prompt_ids: list[int], output_ids: list[int]) -> "Tensor":
    """Return transformers' logits [len(output_ids), vocab] after the prompt and each beginning of the output."""
    import torch

    with torch.inference_mode():
        logits: Tensor = reference_model(folder)(torch.tensor([prompt_ids + output_ids[:-1]]), use_cache=False).logits[
            0
        ]
    return logits[len(prompt_ids) - 1 :]


def reference_choices(folder: Path, prompt_ids: list[int], output_ids: list[int]) -> list[int]:
    """Return the token that transformers puts after the prompt and each beginning of the output, in one pass.

    An output that equals this is, by induction, what reference_greedy gives.
    """
    choices: list[int] = reference_logits(folder, prompt_ids, output_ids).argmax(dim=-1).tolist()
    return choices


def is_greedy(folder: Path, prompt_ids: list[int], output_ids: list[int]) -> bool:
    """Whether transformers finds no token clearly better than each of the output, given those before it."""
    import torch

    logits = reference_logits(folder, prompt_ids, output_ids)
    behind = logits.amax(dim=-1) - logits[torch.arange(len(output_ids)), torch.tensor(output_ids)]
    return bool(behind.max() < NEAR_TIE)
