"""Scales of inputs that move from a projection into whatever computes its inputs (Lin et al., "AWQ", 2023).

x Wᵀ = (x / s) (W s)ᵀ: the projection's columns are multiplied by s, and what computes x is divided by s. That is a
norm, or the rows of the projection before it, where nothing but a linear function lies in between.
"""

from typing import NamedTuple

import torch

from baton_engine.models.llama import LlamaConfig

from .codes import Tensors
from .recording import Site


class Fold(NamedTuple):
    """Where the scales of a site's inputs go.

    source: the full name of the norm, or of the projection, that is divided. rows: the last rows of that projection
    compute the inputs; 0 = the source is a norm. repeats: for each KV head, so many query heads have its values.
    head_dim: elements of such a head.
    """

    site: Site
    source: str
    rows: int = 0
    repeats: int = 1
    head_dim: int = 1


def folds(config: LlamaConfig, prefix: str, sites: list[Site]) -> list[Fold]:
    """Return all folds of a layer of Llama's kind. prefix: of the names of its tensors.

    A norm before experts also feeds their router, which is not quantized, so no scales are folded into it.
    """
    modules: dict[str, list[Site]] = {}
    for site in sites:
        modules.setdefault(site.names[0].rpartition(".")[0].removeprefix(prefix), []).append(site)
    found = []
    for module, (last, first) in modules.items():
        # Layers take the projection that computes their output first. Values and ups are the last rows of the other
        # projections, whether these are fused or not.
        if module == "self_attn":
            values, repeats = config.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
            found += [
                Fold(first, f"{prefix}input_layernorm"),
                Fold(last, first.names[-1], values, repeats, config.head_dim),
            ]
        else:
            if module == "mlp":
                found.append(Fold(first, f"{prefix}post_attention_layernorm"))
            found.append(Fold(last, first.names[-1], last.inputs))
    return found


def averaged_over_heads(fold: Fold, scales: torch.Tensor) -> torch.Tensor:
    """Return scales of inputs, [inputs], averaged over the query heads that have the same values."""
    heads = scales.view(-1, fold.repeats, fold.head_dim)
    return heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()


def apply_fold(fold: Fold, scales: torch.Tensor, layer: Tensors, stored: torch.dtype) -> torch.Tensor:
    """Divide the source of a site's inputs by scales [inputs], and multiply the site's columns by them. Return the
    scales by which they are multiplied.

    layer: the tensors of the layer by their full names, in float32. stored: the dtype of norms in the checkpoint. A
    norm is rounded to that dtype first, and the columns are multiplied by the quotient that this really makes, so the
    product stays the same.
    """
    if fold.rows:
        heads = scales.view(-1, fold.repeats, fold.head_dim)[:, 0].flatten()
        for field in ("weight", "bias"):
            name = f"{fold.source}.{field}"
            if name in layer:
                part = layer[name][-fold.rows :]
                part /= heads.view(-1, *[1] * (part.dim() - 1))
    else:
        norm = layer[f"{fold.source}.weight"]
        divided = (norm / scales).to(stored).float()
        scales = torch.where(divided == 0, 1.0, norm / divided)
        layer[f"{fold.source}.weight"] = torch.where(divided == 0, norm, divided)
    for name in fold.site.names:
        layer[f"{name}.weight"] *= scales
    return scales
