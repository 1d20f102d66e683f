"""OLMo 3 (OLMo Team, 2025): OLMo 2 with windows in three of four layers, whose rotation is never scaled."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .llama import Defaults, LlamaConfig, read_llama_config
from .olmo2 import Olmo2
from .sliding_windows import WithWindowRope, ropes_by_window, windows_in_turn


class Olmo3Config(WithWindowRope, LlamaConfig, frozen=True, kw_only=True):
    window_rope: Rope


class Olmo3(Olmo2):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, context = file.flag("attention_bias"), file.count("max_position_embeddings", 2048)
        theta = file.number("rope_theta", 500000.0)
        rope, window_rope = ropes_by_window(file, context, theta, theta)
        return read_llama_config(
            Olmo3Config,
            file,
            Defaults(2048, rms_norm_eps=1e-5),
            windows_in_turn(file, file.count("num_hidden_layers"), 4),
            rope=rope,
            window_rope=window_rope,
            qkv_bias=bias,
            output_bias=bias,
        )
