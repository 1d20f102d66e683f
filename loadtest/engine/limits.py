"""What a device can do at best: the seconds that a model's work takes at its two measured rates.

Work that cannot overlap is summed: a product waits for the attention before it and the other way round. Within each,
the larger of bytes over bandwidth and operations over arithmetic rate counts (the roofline of Williams et al., 2009).
"""

from dataclasses import dataclass

from baton_engine.model_config import ModelConfig
from loadtest.engine.device import Card


@dataclass(frozen=True)
class Limits:
    """Least seconds for work of a model on a card. itemsize: bytes of a weight and of an element of KV."""

    model: ModelConfig
    itemsize: int
    card: Card

    @property
    def _layer_weights(self) -> int:
        """Elements of the matrices that a token goes through."""
        return self.model.num_layers * self.model.layer_weights

    @property
    def _head_weights(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    def products(self, tokens: int, logits: int, steps: int = 1) -> float:
        """Of all matrix products over so many tokens and rows of logits, the weights read once a step."""
        operations = 2 * (self._layer_weights * tokens + self._head_weights * logits)
        layers = self.model.num_layers * self.model.layer_weights_read(tokens / steps)
        read = steps * self.itemsize * (layers + self._head_weights)
        return self._larger(read, operations)

    def prefill_attention(self, lengths: list[int]) -> float:
        return self._attention(sum(self._pairs(n) for n in lengths), 0)

    def decode_attention(self, contexts: list[int]) -> float:
        """Of one step of sequences with so many tokens each, the new one included."""
        seen = sum(self._seen(n) for n in contexts)
        return self._attention(seen, seen)

    def prefill(self, lengths: list[int]) -> float:
        return self.products(sum(lengths), len(lengths)) + self.prefill_attention(lengths)

    def decode(self, contexts: list[int]) -> float:
        return self.products(len(contexts), len(contexts)) + self.decode_attention(contexts)

    def serve(self, inputs: list[int], outputs: list[int]) -> float:
        """Of requests from prompt to last token, with no more steps than the longest output needs."""
        pairs = zip(inputs, outputs, strict=True)
        # A prompt's last position gives the first output, so the last output is never an input.
        seen = sum(self._pairs(n + m - 1) - self._pairs(n) for n, m in pairs)
        tokens = sum(inputs) + sum(outputs) - len(outputs)
        products = self.products(tokens, sum(outputs), max(outputs))
        return products + self.prefill_attention(inputs) + self._attention(seen, seen)

    def others(self, tokens: int, logits: int) -> dict[str, float]:
        """Of what stands between products and attention in one step, by kind: the bytes that each must move."""
        m = self.model
        heads = m.num_heads + 2 * m.num_kv_heads
        moved = {
            "norm": 4 * tokens * m.hidden_size * (2 * m.num_layers + 1),
            "rope": 2 * tokens * heads * m.head_dim * m.num_layers,
            "activation": 3 * tokens * m.mlp_units * m.num_layers,
            "sampling": logits * m.vocab_size,
        }
        return {kind: self._larger(elements * self.itemsize, 0) for kind, elements in moved.items()}

    def _larger(self, moved: float, operations: float) -> float:
        return max(moved / self.card.bandwidth, operations / self.card.arithmetic)

    def _attention(self, pairs: int, read: int) -> float:
        """pairs: of query and key, and read: keys read from memory, both over all layers."""
        m = self.model
        moved = 2 * m.num_kv_heads * m.head_dim * self.itemsize * read
        return self._larger(moved, 4 * m.num_heads * m.head_dim * pairs)

    def _seen(self, context: int) -> int:
        """Keys that the last token of a context sees, over all layers."""
        return sum(context if window is None else min(context, window) for window in self.model.sliding_windows)

    def _pairs(self, length: int) -> int:
        """Keys that all tokens of a sequence see, over all layers."""
        total = 0
        for window in self.model.sliding_windows:
            ramp = length if window is None else min(length, window)
            total += ramp * (ramp + 1) // 2 + (length - ramp) * ramp
        return total
