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
from baton_engine.kv_dtype import choose_kv_dtype
from baton_engine.load_plan import build_of, planned_takes
from baton_engine.loading import Weights, dtype_name, weights_bytes
from baton_engine.memory_estimate import Card, Fit, fit
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import family_of, load_model_config
from baton_engine.quantization.fields import quantization_of
from baton_engine.quantization.registry import read_quantization

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

    family: the class. active: parameters that a token is multiplied with, embeddings included. kv_dtype: as torch calls
    it. kv_bytes_per_token: of the layers that see all tokens. kv_window_bytes: the most that the other layers hold of a
    sequence.
    """

    family: str
    dtype: str
    parameters: int
    active: int
    weights_bytes: int
    kv_dtype: str
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


def model_facts(folder: Path, dtype: str, cards: Sequence[Card], kv_cache_dtype: str = "auto") -> ModelFacts:
    """Return the facts. dtype, kv_cache_dtype: as the flags of a worker on a GPU.

    Raises ConfigError for a folder that holds no model, for damaged files, and for a dtype that the model does not
    allow.
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
        served = _served(config, folder, dtype, cards, kv_cache_dtype)
        if files is not None:
            not_served = _mismatch(config, folder)
    return ModelFacts(
        architecture=file.architecture,
        not_served=not_served,
        quantization=_quantization(quantization_of(file.fields)),
        files=files,
        served=served,
        licence=read_licence(folder),
        chat_template=chat_template_file(folder),
        **_sizes(config, file.fields),
    )


def _served(
    config: ModelConfig, folder: Path, dtype: str, cards: Sequence[Card], kv_cache_dtype: str
) -> Served:  # fmt: skip
    chosen = choose_dtype(dtype, config.dtype, _GPU)
    takes = {take.name: take for take in planned_takes(build_of(config, 1), chosen)}
    parameters = sum(math.prod(take.shape) for take in takes.values())
    weights = sum(math.prod(take.shape) * take.dtype.itemsize for take in takes.values())
    quantization = read_quantization(folder)
    if quantization.name != "none" and any(folder.glob("*.safetensors")):
        weights = weights_bytes(folder, quantization.sizes(chosen, _GPU))
    unused = config.num_layers * (config.layer_weights_read(math.inf) - config.layer_weights)
    kv_dtype = dtype_name(choose_kv_dtype(kv_cache_dtype, config, chosen))
    layout = config.kv_layout(kv_dtype)
    windows = [window for window in config.sliding_windows if window is not None]
    return Served(
        family=family_of(config.architecture),
        dtype=dtype_name(chosen),
        parameters=parameters,
        active=parameters - round(unused),
        weights_bytes=weights,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=(config.num_layers - len(windows)) * layout.layer_bytes,
        kv_window_bytes=sum(min(window, config.max_position_embeddings) for window in windows) * layout.layer_bytes,
        windows=dict(Counter(windows)),
        gpus={card.name: fit(config, weights, chosen, card, BRIEF_LENGTH, kv_cache_dtype) for card in cards},
    )


def _mismatch(config: ModelConfig, folder: Path) -> str | None:
    """Return what is wrong with the weights' names, shapes or dtypes, if anything is."""
    try:
        weights = Weights(folder, torch.bfloat16, torch.device("meta"))
        build = build_of(config, 1, read_quantization(folder).policy)
        for take in planned_takes(build, weights.dtype, weights):
            weights.range(*take)
    except ConfigError as error:
        return str(error)
    return None


def _files(checkpoint: Checkpoint) -> Files:
    dtypes: Counter[str] = Counter()
    for stored in checkpoint.tensors.values():
        dtypes[stored.dtype] += stored.elements
    return Files(
        bytes=sum(stored.size for stored in checkpoint.tensors.values()),
        tensors=len(checkpoint.names),
        files=len({stored.path for stored in checkpoint.tensors.values()}),
        elements=dtypes.total(),
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
