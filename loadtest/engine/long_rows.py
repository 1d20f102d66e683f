"""Rows of long prompts and long answers, of decodes with long contexts, and of requests with uneven lengths."""

import math
import random

from loadtest.engine.rows import Row, scaled

# The longest leaves room for the output within 131,072 positions.
CONTEXTS = {"4k": 4_096, "16k": 16_384, "32k": 32_768, "128k": 130_048}
_BATCHES = {"4k": (1, 8, 128), "16k": (1, 8, 32, 128), "32k": (1, 8), "128k": (1, 8, 128)}
# Decodes are timed by the difference of two runs, of which prefill is the larger part: so the difference is long, too.
_MORE = 512
_UNEVEN = (128, 16_384)


def make_long_rows(scale: float) -> list[Row]:
    """Return the rows, lengths and numbers of requests multiplied by `scale`.

    Engines skip decodes whose KV does not fit into their memory.
    """
    rows = []
    for name, repeats in (("4k", 7), ("16k", 7), ("32k", 5), ("128k", 3)):
        length = scaled(CONTEXTS[name], scale)
        rows.append(Row(f"first-{name}", f"one prompt of {length}, first token", "ms", [length], [1], repeats))
    for name, count in (("16k", 8), ("32k", 4), ("128k", 1)):
        length = scaled(CONTEXTS[name], scale)
        rows.append(Row(f"prefill-{name}", f"prefill, {count} x {length}", "tok/s", [length] * count, [1] * count))
    for name, batches in _BATCHES.items():
        rows += [
            _decodes(f"decode-{batch}-{name}", [CONTEXTS[name]] * scaled(batch, scale), scale) for batch in batches
        ]
    rng, count = random.Random(0), scaled(64, scale)
    uneven = [_between(rng, *_UNEVEN) for _ in range(count)]
    rows.append(_decodes("decode-uneven", uneven, scale))
    lengths = [scaled(length, scale) for length in uneven]
    name = f"prefill, {count} x {min(lengths)}-{max(lengths)}"
    rows.append(Row("prefill-uneven", name, "tok/s", lengths, [1] * count))
    count, length, answer = scaled(64, scale), scaled(8192, scale), scaled(256, scale)
    name = f"{count} requests, {length} in / {answer} out"
    rows.append(Row("requests-8k", name, "req/s", [length] * count, [answer] * count))
    # Two loads for which other engines' figures are published.
    count, length, answer = scaled(512, scale), scaled(2048, scale), scaled(128, scale)
    name = f"{count} requests, {length} in / {answer} out"
    rows.append(Row("requests-2k", name, "req/s", [length] * count, [answer] * count))
    count, length = scaled(1024, scale), scaled(1000, scale)
    name = f"{count} requests, {length} in / {length} out"
    rows.append(Row("answers", name, "out tok/s", [length] * count, [length] * count))
    return rows


def _decodes(key: str, contexts: list[int], scale: float) -> Row:
    short, inputs = scaled(8, scale), [scaled(length, scale) for length in contexts]
    lengths = f"{inputs[0]}" if len(set(inputs)) == 1 else f"{min(inputs)}-{max(inputs)}"
    outputs = [short + scaled(_MORE, scale)] * len(inputs)
    return Row(key, f"decode, batch {len(inputs)}, {lengths} in", "ms/token", inputs, outputs, short=short)


def _between(rng: random.Random, low: int, high: int) -> int:
    """Return a length of which each octave is as likely as the others."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
