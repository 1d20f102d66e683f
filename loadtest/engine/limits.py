"""The least time that a model's work can take on a device, from the device's two measured rates.

Work that cannot overlap is summed: a product and the attention beside it wait for each other. Within each,
the larger of bytes over bandwidth and operations over arithmetic rate counts (the roofline of Williams et al., 2009).
"""

from dataclasses import dataclass
from pathlib import Path

from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config
from baton_engine.quantization.registry import read_quantization
from loadtest.common.job import Job
from loadtest.engine.device import Card


@dataclass(frozen=True)
class Limits:
    """The least seconds that work of a model takes on a card. itemsize: bytes of an activation. weight_itemsize: bytes
    of a layer's weight, kv_itemsize: of an element of KV; 0 = the same."""

    model: ModelConfig
    itemsize: int
    card: Card
    weight_itemsize: float = 0.0
    kv_itemsize: float = 0.0

    @classmethod
    def of(cls, job: Job, itemsize: int, card: Card) -> "Limits":
        """Return the limits for our engine with a job's settings, on as many of these cards as there are ranks."""
        settings, folder = dict(job.ours), Path(job.model)
        quantization = read_quantization(folder, settings.get("quantization", "auto"))
        per_weight = 0.0 if quantization.name == "none" else quantization.bits / 8
        per_kv = 1.0 if settings.get("kv_cache_dtype") == "fp8" else 0.0
        ranks = int(settings.get("tensor_parallel", 1))
        cards = Card(card.bandwidth * ranks, card.arithmetic * ranks)
        return cls(load_model_config(folder), itemsize, cards, per_weight, per_kv)

    @property
    def _layer_weights(self) -> int:
        """The number of weights that each token is multiplied by."""
        return self.model.num_layers * self.model.layer_weights

    @property
    def _head_weights(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    def products(self, tokens: int, logits: int, steps: int = 1) -> float:
        """Return the time of all matrix products for these tokens and logits rows. A step reads its weights once."""
        operations = 2 * (self._layer_weights * tokens + self._head_weights * logits)
        layers = self.model.num_layers * self.model.layer_weights_read(tokens / steps)
        read = steps * ((self.weight_itemsize or self.itemsize) * layers + self.itemsize * self._head_weights)
        return self._larger(read, operations)

    def prefill_attention(self, lengths: list[int]) -> float:
        return self._attention(sum(self._pairs(n) for n in lengths), 0)

    def decode_attention(self, contexts: list[int]) -> float:
        """Return the time of one step. contexts: the tokens of each sequence, the new one included."""
        seen = sum(self._seen(n) for n in contexts)
        return self._attention(seen, seen)

    def prefill(self, lengths: list[int]) -> float:
        return self.products(sum(lengths), len(lengths)) + self.prefill_attention(lengths)

    def decode(self, contexts: list[int]) -> float:
        return self.products(len(contexts), len(contexts)) + self.decode_attention(contexts)

    def serve(self, inputs: list[int], outputs: list[int]) -> float:
        """Return the time of requests from prompt to last token, in as few steps as the longest output needs."""
        pairs = zip(inputs, outputs, strict=True)
        # A prompt's last position gives the first output, so the last output is never an input.
        seen = sum(self._pairs(n + m - 1) - self._pairs(n) for n, m in pairs)
        tokens = sum(inputs) + sum(outputs) - len(outputs)
        products = self.products(tokens, sum(outputs), max(outputs))
        return products + self.prefill_attention(inputs) + self._attention(seen, seen)

    def others(self, tokens: int, logits: int) -> dict[str, float]:
        """Return the time of a step's other operations by kind, from the bytes that each of them must move."""
        m = self.model
        moved = {
            "norm": 4 * tokens * m.hidden_size * (2 * m.num_layers + 1),
            "rope": 2 * tokens * (m.num_heads * m.head_dim + m.kv_elements) * m.num_layers,
            "activation": 3 * tokens * m.mlp_units * m.num_layers,
            "sampling": logits * m.vocab_size,
        }
        return {kind: self._larger(elements * self.itemsize, 0) for kind, elements in moved.items()}

    def _larger(self, moved: float, operations: float) -> float:
        return max(moved / self.card.bandwidth, operations / self.card.arithmetic)

    def _attention(self, pairs: int, read: int) -> float:
        """pairs: pairs of query and key. read: keys that are read from memory; 0 for prompts, because their
        arithmetic takes longer than reading the keys. Both count all layers."""
        m = self.model
        return self._larger(
            m.kv_elements * (self.kv_itemsize or self.itemsize) * read, m.pair_operations(decode=read > 0) * pairs
        )

    def _seen(self, context: int) -> int:
        """Return how many keys the last token of a context sees, over all layers."""
        return sum(context if window is None else min(context, window) for window in self.model.sliding_windows)

    def _pairs(self, length: int) -> int:
        """Return how many keys all tokens of a sequence see together, over all layers."""
        total = 0
        for window in self.model.sliding_windows:
            ramp = length if window is None else min(length, window)
            total += ramp * (ramp + 1) // 2 + (length - ramp) * ramp
        return total
