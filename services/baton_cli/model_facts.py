"""Facts about a model, from its config and the headers of its weights. No tensor is read, and no GPU is needed."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton_cli.model_card import Licence, chat_template_file, read_licence
from baton_engine.checkpoint import Checkpoint
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.device import choose_dtype
from baton_engine.load_plan import planned_takes
from baton_engine.loading import Weights
from baton_engine.memory_estimate import Card, Fit, fit
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import MODELS, load_model_config, model_class

# Tokens of the shorter sequences that are counted for each GPU.
BRIEF_LENGTH = 4096
# The GPU's defaults for "auto" are asked for, which needs no GPU.
_GPU = torch.device("cuda")


class Files(msgspec.Struct, frozen=True):
    """The weights as the files hold them. dtypes: elements of each dtype, the most frequent one first."""

    bytes: int
    tensors: int
    files: int
    elements: int
    dtypes: dict[str, int]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the engine serves it.

    family: the class. active: parameters that a token is multiplied with, embeddings included. kv_bytes_per_token: of
    the layers that see all tokens. kv_window_bytes: the most that the other layers hold of a sequence.
    """

    family: str
    dtype: str
    parameters: int
    active: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_window_bytes: int
    windows: dict[int, int]  # how many layers have each window, in tokens
    gpus: dict[str, Fit]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """not_served: the reason why the engine would refuse the model; None = it serves it.

    Sizes are those of config.json, which may lack any of them if the model is not served.
    """

    architecture: str
    not_served: str | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    context: int | None
    quantization: str | None
    files: Files | None
    served: Served | None
    licence: Licence
    chat_template: str | None


def model_facts(folder: Path, dtype: str, cards: Sequence[Card]) -> ModelFacts:
    """Return the facts. dtype: as --dtype of a worker on a GPU.

    Raises ConfigError for a folder that holds no model, and for damaged files.
    """
    file = ConfigFile.read(folder)
    not_served, config, served = None, None, None
    try:
        config = load_model_config(folder)
    except ConfigError as error:
        not_served = str(error)
    files = None
    if any(folder.glob("*.safetensors")):
        files = _files(Checkpoint.read(folder))
    elif any(folder.glob("*.bin")):
        not_served = not_served or "weights in pickle files are not read"
    if config is not None:
        served = _served(config, folder, dtype, cards)
        if files is not None:
            not_served = _mismatch(config, folder)
    return ModelFacts(
        architecture=file.architecture,
        not_served=not_served,
        quantization=_quantization(file.fields.get("quantization_config")),
        files=files,
        served=served,
        licence=read_licence(folder),
        chat_template=chat_template_file(folder),
        **_sizes(config, file.fields),
    )


def _served(config: ModelConfig, folder: Path, dtype: str, cards: Sequence[Card]) -> Served:
    chosen = choose_dtype(dtype, config.dtype, _GPU)
    kind = model_class(config.architecture)
    takes = planned_takes(lambda source: kind(config, source, 1), chosen)
    sizes = {take.name: (math.prod(take.shape), take.dtype.itemsize) for take in takes}
    parameters = sum(elements for elements, _ in sizes.values())
    weights = sum(elements * itemsize for elements, itemsize in sizes.values())
    unused = config.num_layers * (config.layer_weights_read(math.inf) - config.layer_weights)
    name = str(chosen).removeprefix("torch.")
    layout = config.kv_layout(name)
    windows = [window for window in config.sliding_windows if window is not None]
    return Served(
        family=".".join(MODELS[config.architecture]),
        dtype=name,
        parameters=parameters,
        active=parameters - round(unused),
        weights_bytes=weights,
        kv_bytes_per_token=(config.num_layers - len(windows)) * layout.layer_bytes,
        kv_window_bytes=sum(min(window, config.max_position_embeddings) for window in windows) * layout.layer_bytes,
        windows=dict(Counter(windows)),
        gpus={card.name: fit(config, weights, chosen, card, BRIEF_LENGTH) for card in cards},
    )


def _mismatch(config: ModelConfig, folder: Path) -> str | None:
    """Return what is wrong with the weights' names, shapes or dtypes, if anything is."""
    kind = model_class(config.architecture)
    try:
        weights = Weights(folder, torch.bfloat16, torch.device("meta"))
        for take in planned_takes(lambda source: kind(config, source, 1), weights.dtype, weights.names):
            weights.range(take.name, take.shape, take.part)
    except ConfigError as error:
        return str(error)
    return None


def _files(checkpoint: Checkpoint) -> Files:
    dtypes: Counter[str] = Counter()
    for stored in checkpoint:
        dtypes[stored.dtype] += stored.elements
    return Files(
        bytes=sum(stored.size for stored in checkpoint),
        tensors=len(checkpoint.names),
        files=len({stored.path for stored in checkpoint}),
        elements=checkpoint.elements(),
        dtypes=dict(dtypes.most_common()),
    )


def _quantization(fields: Any) -> str | None:
    if not fields:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    return method if isinstance(method, str) else "unnamed"


def _sizes(config: ModelConfig | None, fields: dict[str, Any]) -> dict[str, int | None]:
    if config is not None:
        return {
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context": config.max_position_embeddings,
        }
    names = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    given = {fact: fields.get(name) for fact, name in names.items()}
    return {fact: value if isinstance(value, int) else None for fact, value in given.items()}
