"""Turns the tokens of one choice of an answer into text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_proto import serving_pb2 as pb

from ..models.detokenizer import Detokenizer
from ..reading.parts import AnswerReader, Part, joined
from .stop import StopMatcher


@dataclass(slots=True)
class Piece:
    """The output that some tokens add to a choice. A token's offset is the number of characters before it.

    parts: the text as parts of a chat answer; None = all of it is content. thought_tokens: how many of its first tokens
    belong to thoughts or end them.
    """

    text: str = ""
    parts: list[Part] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    thought_tokens: int = 0

    def extend(self, other: "Piece") -> None:
        self.text += other.text
        if other.parts is not None:
            self.parts = joined(self.parts or [], other.parts)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.offsets += other.offsets


class Choice:
    """Turns the tokens of one choice into text until a stop string, a stop token or the pod ends it."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
        silent: bool = False,
        reader: AnswerReader | None = None,
    ) -> None:
        """stop_ids: tokens that end the choice and are not part of its text, unless include_stop.

        min_tokens: stop strings are ignored until the choice has more tokens than this.
        silent: the tokens of the choice are dropped, because the client asked for no output.
        reader: finds thoughts and tool calls in the text; None = all of it is content.
        """
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stops, include_stop) if stops else None
        self._stop_ids = frozenset() if include_stop else stop_ids
        self._min_tokens = min_tokens
        self._silent = silent
        self._reader = reader
        self.may_think = reader is not None and reader.may_think
        self._length = 0
        self.tokens = 0  # completion tokens for usage
        self.reasoning_tokens = 0  # of these, the tokens that lie between the markers of thoughts
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def calls(self) -> int:
        """The number of complete tool calls."""
        return 0 if self._reader is None else self._reader.calls

    def feed(self, delta: pb.Delta) -> Piece:
        """Take tokens from the pod and return their output. `finish_reason` is set when the choice has ended."""
        finish = delta.finish_reason
        if self._silent:
            self.finish_reason = "length" if finish else None
            return Piece()
        token_ids = list(delta.token_ids)
        unseen = 0
        if finish == pb.FINISH_REASON_STOP and token_ids and token_ids[-1] in self._stop_ids:
            unseen = 1
        if self._stop is None and not delta.logprobs and (len(token_ids) == 1 or not self.may_think):
            self.tokens += len(token_ids)
            text = self._detokenizer.push(token_ids[:-1] if unseen else token_ids)
            piece = Piece(text, None, token_ids)
            if (reader := self._reader) is not None:
                was_thinking = reader.thinking
                piece.parts = reader.push(text) if text else []
                self.reasoning_tokens += was_thinking and reader.thinking
        else:
            piece = self._feed_singly(token_ids, delta.logprobs, unseen)
        if self.finish_reason is None and finish != pb.FINISH_REASON_NONE:
            self._finish(delta, piece)
        if self._reader is not None and (self.finish_reason is not None or piece.parts is None):
            self._extend(piece, self._reader.end() if self.finish_reason is not None else [])
        return piece

    def _feed_singly(self, token_ids: list[int], logprobs: Sequence[pb.TokenLogprobs], unseen: int) -> Piece:
        """Take tokens one by one, to find the offset of each, the token that completes a stop string, and thoughts."""
        piece = Piece()
        for position, token_id in enumerate(token_ids):
            self.tokens += 1
            piece.token_ids.append(token_id)
            if logprobs:
                piece.logprobs.append(logprobs[position])
                piece.offsets.append(self._length)
            if position < len(token_ids) - unseen:
                self._read(piece, self._show(self._detokenizer.push((token_id,))))
            if self.finish_reason is not None:
                break
        return piece

    def _read(self, piece: Piece, text: str) -> None:
        """Add the text of a token to a piece."""
        reader = self._reader
        if reader is None:
            piece.text += text
            return
        was_thinking = reader.thinking
        self._add(piece, text)
        if was_thinking:
            piece.thought_tokens = len(piece.token_ids)
            self.reasoning_tokens += reader.thinking

    def _show(self, text: str) -> str:
        self._length += len(text)
        if self._stop is None or self.tokens <= self._min_tokens:
            return text
        text, stop = self._stop.push(text)
        if stop is not None:
            self.finish_reason = "stop"
            self.stop_reason = stop
        return text

    def _finish(self, delta: pb.Delta, piece: Piece) -> None:
        self._add(piece, self._show(self._detokenizer.flush()))
        if self.finish_reason is not None:
            return
        if self._stop is not None:
            self._add(piece, self._stop.flush())
        self.finish_reason = "stop" if delta.finish_reason == pb.FINISH_REASON_STOP else "length"
        if delta.HasField("stop_token_id"):
            self.stop_reason = delta.stop_token_id

    def _add(self, piece: Piece, text: str) -> None:
        """Add text to a piece. The reader divides it into parts."""
        piece.text += text
        if self._reader is not None and text:
            self._extend(piece, self._reader.push(text))

    def _extend(self, piece: Piece, parts: list[Part]) -> None:
        piece.parts = parts if not piece.parts else joined(piece.parts, parts)
