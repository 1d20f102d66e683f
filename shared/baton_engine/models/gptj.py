"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP in parallel after one LayerNorm, a part of each head rotated in
pairs of neighbours."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope, fraction_of

from .gpt2_names import Gpt2Named, Gpt2NamedLayer, gpt2_fields, read_gpt2_like
from .layer_norm_llama import LayerNormConfig
from .llama import Defaults, LlamaConfig


class GptJLayer(Gpt2NamedLayer):
    norms = ("ln_1", "")
    output = "out_proj"
    projections = ("fc_in", "fc_out")


class GptJ(Gpt2Named):
    layer = GptJLayer
    head_bias = True

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # transformers scales the scores of all models of the family.
        file.require_absent("scale_attn_weights", True)
        file = gpt2_fields(file, 4096, 28, 16, 2048)
        dim = file.count("head_dim")
        rotated = file.at_most("rotary_dim", dim, 64)
        return read_gpt2_like(
            LayerNormConfig,
            file,
            50400,
            Defaults(2048),
            rope=Rope("default", 10000.0, partial=fraction_of(rotated, dim), interleaved=True),
            parallel=True,
            two_norms=False,
        )
