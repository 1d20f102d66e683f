"""openPangu Embedded (Huawei, 2025): Llama with biases of attention."""

from baton_engine.config_file import ConfigFile

from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config

# Later models of the same architecture's name differ from Llama by these. The values change nothing.
_OF_LATER_ONES: dict[str, tuple[object, ...]] = {
    "interleaved_sliding_window": (), "param_sink_number": (0,), "sandwich_norm": (False,), "is_causal": (True,),
    "mlp_bias": (False,),
}  # fmt: skip


class PanguEmbedded(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, values in _OF_LATER_ONES.items():
            file.require_absent(name, *values)
        bias, defaults = file.flag("bias", True), Defaults(32768, 8, rms_norm_eps=1e-5, rope_theta=16e6)
        file.require_absent("qkv_bias", bias)
        return read_llama_config(LlamaConfig, file, defaults, activations=SILU, qkv_bias=bias, output_bias=bias)
