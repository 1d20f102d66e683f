"""Two engines in one process, KV carried between them by hand."""

import random

import msgspec
import torch

from baton_common.extent import Extent
from baton_engine.delta import Reservation
from baton_engine.engine import Engine
from baton_engine.exports import Export
from baton_engine.sequence import Request

from .harness import Transcript

_MOST_STEPS = 6_000


class Piece(msgspec.Struct):
    """KV that has been exported and not imported yet."""

    id: int
    extent: Extent
    values: torch.Tensor


class Pair:
    """A prefill engine, a decode engine, and the KV and tokens between them, delivered in random order and pieces."""

    def __init__(self, prefill: Engine, decode: Engine, seed: int = 0) -> None:
        self.prefill = prefill
        self.decode = decode
        self.transcript = Transcript()
        self.reservations: dict[int, Reservation] = {}
        self.pieces: list[Piece] = []
        self.first_tokens: dict[int, list[int]] = {}
        self.early = 0  # number of exports of only some layers
        self._requests: dict[int, Request] = {}
        self._head_dim = prefill.model.head_dim
        self._random = random.Random(seed)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self.transcript.expect(request)
        self.decode.add(msgspec.structs.replace(request, imports_kv=True))

    def run(self) -> Transcript:
        """Step both engines and deliver pieces in random order until all work is done. Returns the client's view."""
        for _ in range(_MOST_STEPS):
            if not (self.decode.has_work or self.prefill.has_work or self.pieces or self.first_tokens):
                return self.transcript
            self._random.choice([self.step_decode, self.step_prefill, self.deliver, self.deliver])()
        raise AssertionError(f"still at work after {_MOST_STEPS} moves")

    def step_decode(self) -> None:
        """Step the decode engine, and send the requests for which it has reserved blocks to the other engine."""
        result = self.decode.step()
        # The prefill engine has already reported the end of a choice that ends with its first token.
        self.transcript.take([delta for delta in result.deltas if delta.tokens])
        for reservation in result.reservations:
            self.reservations[reservation.id] = reservation
            self.order(reservation)

    def order(self, reservation: Reservation) -> None:
        request = self._requests[reservation.id]
        self.prefill.add(msgspec.structs.replace(request, exports_from=reservation.first_token))

    def step_prefill(self) -> None:
        """Step the prefill engine, cut what it exports into pieces, and show the client the first tokens."""
        for export in self.prefill.early_exports():
            self.early += 1
            self._cut(export)
        result = self.prefill.step()
        for export in result.exports:
            self._cut(export)
        self.transcript.take(result.deltas)
        for delta in result.deltas:
            self.first_tokens.setdefault(delta.id, []).append(delta.tokens[0])

    def deliver(self) -> None:
        """Hand one piece, or one request's first tokens, to the decode engine."""
        everything = len(self.pieces) + len(self.first_tokens)
        if everything and self._random.randrange(everything) < len(self.pieces):
            self.deliver_piece()
        elif self.first_tokens:
            id = self._random.choice(list(self.first_tokens))
            self.decode.import_tokens(id, self.first_tokens.pop(id))

    def deliver_piece(self) -> bool | None:
        piece = self.pieces.pop(self._random.randrange(len(self.pieces)))
        generation = self.reservations[piece.id].generation
        complete = self.decode.import_kv(piece.id, generation, piece.extent, piece.values)
        if complete:
            self.prefill.abort(piece.id)
        return complete

    def _cut(self, export: Export) -> None:
        all_of, size = export.extent, self.prefill.config.block_size
        at, end = all_of.tokens.start, all_of.tokens.stop
        while at < end:
            # Whole blocks, or any number of tokens.
            wanted = self._random.choice([size, 2 * size, self._random.randint(1, 3 * size)])
            whole = msgspec.structs.replace(all_of, first_token=at, num_tokens=min(wanted, end - at))
            for extent in self._random.choice([[whole], parts(whole)]):
                values = torch.empty(self.prefill.runner.cache.layout.size(extent), dtype=torch.uint8)
                self.prefill.runner.cache.gather(export.tables, extent, values)
                self.pieces.append(Piece(export.id, extent, values))
            at += whole.num_tokens


def parts(extent: Extent) -> list[Extent]:
    """Cut an extent into its first layer and the others, each into its first head and the others."""
    first = extent.first_layer
    layers = [(first, 1), (first + 1, extent.num_layers - 1)]
    heads = [(0, 1), (1, extent.num_heads - 1)]
    return [
        msgspec.structs.replace(
            extent, first_layer=first_layer, num_layers=num_layers, first_head=first_head, num_heads=num_heads
        )
        for first_layer, num_layers in layers
        for first_head, num_heads in heads
        if num_layers and num_heads
    ]
