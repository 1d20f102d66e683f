"""TeleChat 3 (TeleAI, 2025): Llama with YaRN, whose factor of queries and keys grows more slowly."""

import math

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import rope_fields

from .llama import Llama, LlamaConfig


class Telechat3(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        rope = rope_fields(file)
        if (rope.get("rope_type") or rope.get("type")) == "telechat3-yarn":
            growth = 0.07 * math.log(max(ConfigFile(rope).number("factor"), 1.0))
            rope |= {"rope_type": "yarn", "attention_factor": growth + 1.0}
            file = ConfigFile({**file.fields, "rope_scaling": rope, "rope_parameters": None})
        return super().read_config(file)
