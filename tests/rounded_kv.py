"""transformers with keys and values that are rounded to FP8 and back as soon as they are computed."""

from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from .models import reference_model

MOST = 448.0


class RoundedCache(DynamicCache):
    """scales: of each layer, those of the keys' heads, then those of the values' heads, [2, kv_heads]."""

    def __init__(self, scales: list[torch.Tensor], config: Any) -> None:
        super().__init__(config=config)
        self._of_layers = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = self._of_layers[layer_idx]
        keys, values = rounded(key_states, of_keys), rounded(value_states, of_values)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x: [1, heads, tokens, dim]."""
    each = scales[:, None, None]
    return (x / each).clamp(-MOST, MOST).to(torch.float8_e4m3fn).float() * each


def rounded_logits(folder: Path, tokens: list[int], scales: list[torch.Tensor]) -> torch.Tensor:
    """Return transformers' logits [tokens, vocab] after each token."""
    model = reference_model(folder)
    with torch.inference_mode():
        past = RoundedCache(scales, model.config)
        logits: torch.Tensor = model(torch.tensor([tokens]), past_key_values=past, use_cache=True).logits[0]
    return logits


def rounded_choices(folder: Path, prompt: list[int], output: list[int], scales: list[torch.Tensor]) -> list[int]:
    """Return the token that transformers puts after the prompt and each beginning of the output, as reference_choices
    does."""
    chosen: list[int] = rounded_logits(folder, prompt + output[:-1], scales)[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return chosen
