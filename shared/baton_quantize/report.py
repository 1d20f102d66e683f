"""What quantizing has done to a model."""

from collections.abc import Iterable

import msgspec

from baton_engine.checkpoint import Stored


class Side(msgspec.Struct, frozen=True):
    """The model before or after.

    bytes: of all tensors. decode_bytes: of the tensors that a decode step reads in full: all but an embedding that is
    not the head, too. perplexity, accuracy: of the next token of the text; None = no text was given.
    """

    bytes: int
    decode_bytes: int
    perplexity: float | None
    accuracy: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """calibration_tokens: 0 where the format needs none. evaluated: which text, and None if there was none. agreement:
    the fraction of its tokens for which both find the same next token most probable. divergence: the mean divergence of
    probabilities, in nats; its noise is far below that of perplexity. fewer_bytes: how many times fewer
    bytes of weights a decode step reads."""

    format: str
    group_size: int | None
    calibration_tokens: int
    evaluated: str | None
    evaluated_tokens: int
    before: Side
    after: Side
    agreement: float | None
    divergence: float | None
    fewer_bytes: float

    def table(self) -> str:
        """Return the report as text."""
        rows = [["", "before", "after"]]
        for label, decimals, before, after in (
            ("perplexity", 4, self.before.perplexity, self.after.perplexity),
            ("next token right", 4, self.before.accuracy, self.after.accuracy),
        ):
            if before is not None and after is not None:
                rows.append([label, f"{before:.{decimals}f}", f"{after:.{decimals}f}"])
        rows.append(["size", _size(self.before.bytes), _size(self.after.bytes)])
        rows.append(["weights per decode step", _size(self.before.decode_bytes), _size(self.after.decode_bytes)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.agreement is None:
            lines.append("no text was given, so the quality was not measured (--evaluate)")
        else:
            lines.append(f"the most probable token is the same for {self.agreement:.2%} of {self.evaluated_tokens:,} "
                         f"tokens of {self.evaluated}")  # fmt: skip
            lines.append(f"probabilities diverge by {self.divergence:.5f} nats")
        lines.append(
            f"a decode step reads {self.fewer_bytes:.2f} times fewer bytes of weights. That bounds its speed-up on a "
            "GPU: it comes near for short contexts and few sequences at once, and was not measured"
        )
        return "\n".join(lines)


def decode_bytes(tensors: Iterable[tuple[str, Stored]], tied: bool) -> int:
    """Return the bytes of tensors that a decode step reads. tied: the embedding is the head, too."""
    return sum(stored.size for name, stored in tensors if tied or not name.startswith("model.embed_tokens."))


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
