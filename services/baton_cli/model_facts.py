"""Facts about a model, from its config and the headers of its weights. No tensor is read, and no GPU is needed."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton_cli.model_card import Licence, chat_template_file, read_licence
from baton_cli.model_weights import KnownWeights, weights_in
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
from baton_engine.quantization.dense import DENSE
from baton_engine.quantization.fields import quantization_of
from baton_engine.quantization.registry import Quantization, read_quantization
from baton_engine.source import Method

# Tokens of the shorter sequences that are counted for each GPU.
BRIEF_LENGTH = 4096
# The values of "auto" are those for a GPU. Computing them needs no GPU.
_GPU = torch.device("cuda")


class Files(msgspec.Struct, frozen=True):
    """The weights as the files hold them. dtypes: elements of each dtype, the most frequent one first."""

    bytes: int
    tensors: int
    files: int
    elements: int
    dtypes: dict[str, int]
    on_hub: bool


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the engine serves it.

    family: the class. held: how the weights are held in memory, in words. active: parameters that a token is multiplied
    with, embeddings included. estimated: weights_bytes is an estimate, made from config.json alone. kv_dtype: the name
    of the torch dtype. kv_bytes_per_token: of the layers that see all tokens. kv_window_bytes: the most that layers
    with a window hold of a sequence. states: how many layers have a recurrent state. kv_state_bytes: of all of these.
    """

    family: str
    dtype: str
    held: str
    parameters: int
    active: int
    weights_bytes: int
    estimated: bool
    kv_dtype: str
    kv_bytes_per_token: int
    kv_window_bytes: int
    windows: dict[int, int]  # how many layers have each window, in tokens
    states: int
    kv_state_bytes: int
    gpus: dict[str, Fit]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """not_served: the reason why the engine would refuse the model; None = there is no known reason.
    weights_unknown: the reason why nothing is known of the weights.

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
    weights_unknown: str | None
    served: Served | None
    licence: Licence
    chat_template: str | None


def model_facts(
    folder: Path, dtype: str, cards: Sequence[Card], kv_cache_dtype: str = "auto", quantization: str = "auto",
    weights: KnownWeights | None = None,
) -> ModelFacts:  # fmt: skip
    """Return the facts. dtype, kv_cache_dtype, quantization: as the flags of a worker on a GPU.

    weights: None = those in the folder. Raises ConfigError for a folder that holds no model, for damaged files, and for
    a dtype or a quantization that the model does not allow.
    """
    file = ConfigFile.read(folder)
    weights = weights or weights_in(folder)
    not_served, config, served = weights.refused, None, None
    described = _quantization(quantization_of(file.fields))
    try:
        config = load_model_config(folder)
    except ConfigError as error:
        not_served = str(error)
    if config is not None:
        held = read_quantization(folder, quantization)
        served = _served(config, weights.checkpoint, held, dtype, cards, kv_cache_dtype)
        not_served = not_served or _mismatch(config, weights.checkpoint, held)
        described = described or (None if held.name == "none" else held.name)
    return ModelFacts(
        architecture=file.architecture,
        not_served=not_served,
        quantization=described,
        files=None if weights.checkpoint is None else _files(weights.checkpoint, folder),
        weights_unknown=weights.unknown,
        served=served,
        licence=read_licence(folder),
        chat_template=chat_template_file(folder),
        **_sizes(config, file.fields),
    )


def _served(
    config: ModelConfig, checkpoint: Checkpoint | None, quantization: Quantization, dtype: str, cards: Sequence[Card],
    kv_cache_dtype: str,
) -> Served:  # fmt: skip
    chosen = choose_dtype(dtype, config.dtype, _GPU)
    parameters, weights = _planned(config, quantization, chosen)
    if checkpoint is not None and quantization.name != "none":
        weights = weights_bytes(checkpoint.folder, quantization.sizes(chosen, _GPU), checkpoint=checkpoint)
    held = quantization.describe(chosen, keeps_codes=True)
    unused = config.num_layers * (config.layer_weights_read(math.inf) - config.layer_weights)
    kv_dtype = dtype_name(choose_kv_dtype(kv_cache_dtype, config, chosen))
    layout = config.kv_layout(kv_dtype)
    states, layers = len(layout.state_layers), enumerate(config.sliding_windows[: config.kv_layers])
    windows = [window for layer, window in layers if window is not None and layer not in layout.state_layers]
    return Served(
        family=family_of(config.architecture),
        dtype=dtype_name(chosen),
        held=held,
        parameters=parameters,
        active=parameters - round(unused),
        weights_bytes=weights,
        estimated=checkpoint is None and quantization.name != "none",
        kv_dtype=kv_dtype,
        kv_bytes_per_token=(config.kv_layers - len(windows) - states) * layout.layer_bytes,
        kv_window_bytes=sum(min(window, config.max_position_embeddings) for window in windows) * layout.layer_bytes,
        windows=dict(Counter(windows)),
        states=states,
        kv_state_bytes=states * layout.state_rows * layout.layer_bytes,
        gpus={card.name: fit(config, weights, chosen, card, BRIEF_LENGTH, kv_cache_dtype, held) for card in cards},
    )


def _planned(config: ModelConfig, quantization: Quantization, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of parameters according to config.json, and their bytes, an estimate for quantized weights."""
    coded: set[str] = set()

    def note(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        # Few tools quantize sensitive weights, and configs rarely say whether they are.
        if not sensitive and quantization.policy(name, sensitive, lambda tensor: True) != DENSE:
            coded.add(name)
        return DENSE

    takes = {take.name: take for take in planned_takes(build_of(config, 1, note), dtype)}
    # One tensor may hold the weights of all experts, although the names asked for have the number of an expert.
    split = [name.rsplit(".", 2) for name in coded if name.count(".") > 1]
    joined = {parent for parent, number, _ in split if number.isdecimal()}
    parameters, size = 0, 0.0
    for name, take in takes.items():
        elements, weight = math.prod(take.shape), name.removesuffix(".weight")
        of_experts = weight.rpartition(".")[0] in joined and len(take.shape) > 1 and not name.endswith("bias")
        is_coded = weight in coded or of_experts
        parameters += elements
        size += elements * (quantization.bits / 8 if is_coded else take.dtype.itemsize)
    return parameters, round(size)


def _mismatch(config: ModelConfig, checkpoint: Checkpoint | None, quantization: Quantization) -> str | None:
    """Return the problem with the weights' names, shapes or dtypes; None if there is none."""
    build = build_of(config, 1, quantization.policy)
    try:
        if checkpoint is None:
            if quantization.name.startswith("on load"):
                planned_takes(build, torch.bfloat16)
            return None
        weights = Weights(checkpoint.folder, torch.bfloat16, torch.device("meta"), checkpoint=checkpoint)
        for take in planned_takes(build, weights.dtype, weights):
            weights.range(*take)
    except ConfigError as error:
        return str(error)
    return None


def _files(checkpoint: Checkpoint, folder: Path) -> Files:
    dtypes: Counter[str] = Counter()
    for stored in checkpoint.tensors.values():
        dtypes[stored.dtype] += stored.elements
    return Files(
        bytes=sum(stored.size for stored in checkpoint.tensors.values()),
        tensors=len(checkpoint.names),
        files=len({stored.path for stored in checkpoint.tensors.values()}),
        elements=dtypes.total(),
        dtypes=dict(dtypes.most_common()),
        on_hub=checkpoint.folder != folder,
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
