"""Whether a model fits on a GPU that this machine does not have, by the arithmetic with which the engine starts.

Only the memory of the largest steps, which the engine measures on the device, is estimated here.
"""

import msgspec
import torch

from .config import ConfigError, EngineConfig
from .kv_dtype import choose_kv_dtype
from .loading import dtype_name
from .memory import GRAPHS_BYTES, LIBRARIES_BYTES, Budget, KvShape, check_weights, choose_num_blocks
from .model_config import ModelConfig

# Tensors of the size of the logits that the draws of one step have at the same time, in float32.
_LOGITS_COPIES = 4


class Card(msgspec.Struct):
    """A GPU that nothing else uses, as the engine sees it (Memory). size: the bytes that CUDA reports."""

    name: str
    size: int
    measured: bool = True

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size

    def held(self) -> int:
        return 0

    def trim(self) -> None:
        pass


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens and sequences fit on a GPU beside the weights. Lengths are in tokens.

    kv_tokens: of all sequences together, when each has the longest context. longest: of one sequence. full: how many
    sequences of the longest context fit at once, brief: how many of `brief_length`. problem: why the engine would not
    start with the model's own context, and what helps; None = it starts.
    """

    weights_fit: bool
    kv_bytes: int = 0
    kv_tokens: int = 0
    longest: int = 0
    full: int = 0
    brief: int = 0
    problem: str | None = None


def fit(
    model: ModelConfig, weights: int, dtype: torch.dtype, card: Card, brief_length: int, kv_cache_dtype: str = "auto",
    held: str | None = None,
) -> Fit:  # fmt: skip
    """weights: bytes of the weights. dtype: of activations. kv_cache_dtype: as --kv-cache-dtype; raises ConfigError for
    one that the model does not allow. held: how the weights are held, in words; None = in dtype."""
    config = EngineConfig(model="", kv_cache_dtype=kv_cache_dtype).on("cuda")
    layout = model.kv_layout(dtype_name(choose_kv_dtype(kv_cache_dtype, model, dtype)))
    config = msgspec.structs.replace(config, block_size=layout.block_size(config.block_size))
    share = int(card.size * config.gpu_memory_utilization)
    try:
        check_weights(weights, card, share, held or dtype_name(dtype))
    except ConfigError as error:
        return Fit(weights_fit=False, problem=str(error))
    shape = KvShape(
        layout.slot_bytes * config.block_size, config.block_size, model.max_position_embeddings, layout.groups,
        config.max_num_batched_tokens,
    )  # fmt: skip
    forward, sampling = _step_bytes(model, config, dtype)
    budget = Budget(
        device=card.name,
        total=card.size,
        free=max(card.size - weights - forward - sampling - LIBRARIES_BYTES, 0),
        share=share,
        weights=weights,
        forward=forward,
        sampling=sampling,
        graphs=GRAPHS_BYTES,
        libraries=LIBRARIES_BYTES,
    )
    problem = None
    num_blocks = budget.for_kv // shape.block_bytes
    try:
        num_blocks = choose_num_blocks(budget, shape, config, measured=True)
    except ConfigError as error:
        problem = str(error)
    return Fit(
        weights_fit=True,
        kv_bytes=num_blocks * shape.block_bytes,
        kv_tokens=shape.tokens(num_blocks),
        longest=min(shape.longest(num_blocks), shape.max_model_len),
        full=num_blocks // shape.least,
        brief=num_blocks // shape.blocks(min(brief_length, shape.max_model_len)),
        problem=problem,
    )


def _step_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return the approximate bytes of the largest step's tensors: those of the layers, and those of the draws."""
    hidden, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    inner = (model.layer_weights - model.attention_weights) // (3 * hidden)
    # Gates, ups and their products, or else queries, keys, values and what attention returns; and beside them the
    # residual, a norm of it and the output of the layer.
    widest = max(3 * inner, 2 * (heads + kv_heads) * max(*model.head_dims, model.value_dim))
    widest += 3 * hidden + model.stream_size
    logits = config.max_num_seqs * model.vocab_size * torch.float32.itemsize
    return config.max_num_batched_tokens * widest * dtype.itemsize, _LOGITS_COPIES * logits
