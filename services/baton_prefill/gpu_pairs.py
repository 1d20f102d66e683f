"""The connections over which this pod's GPU sends KV to decode pods' GPUs."""

import logging
from collections import Counter
from collections.abc import Iterable

from baton_common.rank_parts import divides, most_links, rank_parts
from baton_proto import handover_pb2 as kv
from baton_worker.engine_client import EngineClient
from baton_worker.messages import ClosePair, GrantPair, OpenPair, Output, UsePair

from .session import Session

log = logging.getLogger(__name__)

# How often a pair may be opened for one link at a decode pod's request, since each costs both engines time.
_MOST_OPENED = 8
# The most pieces that a decode pod may allow at a time. A correct one has only a few slots for each pair.
_MOST_CREDIT = 1_024
# How many characters of a decode pod's reason for a lost pair are logged.
_MOST_REASON = 200


class GpuPairs:
    """The pairs of all sessions, each with the number of its session. It checks decode pods' messages about them."""

    def __init__(self, engine: EngineClient, sessions: dict[int, Session], events: Counter[str]) -> None:
        """events: counts refusals."""
        self._engine = engine
        self._sessions = sessions
        self._events = events

    def offer(self, session: Session, hello: kv.Hello) -> None:
        """Open a pair with a decode pod that can have one. Without room, the pair waits until another one ends."""
        ready = self._engine.ready
        if not 0 < ready.gpu_slot_bytes <= hello.gpu_piece_bytes:
            return
        problem = self._unsuitable(hello)
        if problem is not None:
            extra = {"event": "pair_refused", "epoch": session.epoch}
            log.warning(
                "KV for the decode pod of epoch %d cannot go from GPU to GPU: %s", session.epoch, problem, extra=extra
            )
            return
        session.gpu_checked = not hello.gpu_unchecked
        session.gpu_credit = min(hello.gpu_credit, _MOST_CREDIT) or None
        session.gpu_ranks = len(hello.gpus) or 1
        session.pair_links, _ = most_links(ready.layout.num_heads, len(ready.gpus), session.gpu_ranks)
        session.pair_wanted = True
        self._open_wanted()
        if not session.pair_opened:
            self._events["pair_refused"] += 1
            log.warning(
                "KV for the decode pod of epoch %d cannot go from GPU to GPU: there is room for only %d pairs",
                session.epoch, ready.gpu_pairs // session.pair_links, extra={"event": "pair_refused"},
            )  # fmt: skip

    def _unsuitable(self, hello: kv.Hello) -> str | None:
        """Return why no pair with a decode pod is possible; None if one is."""
        ready, ranks = self._engine.ready, len(hello.gpus) or 1
        ours, heads = ready.gpus, ready.layout.num_heads
        if not hello.gpus and len(ours) > 1:
            return "its version pairs only with pods of one rank"
        if not divides(heads, ranks):
            return f"it has {ranks} ranks, among which {heads} KV heads cannot be divided"
        if hello.gpus and any(
            ours[part.sender] == hello.gpus[part.receiver] for part in rank_parts(heads, len(ours), ranks)
        ):
            return "a rank of each pod is on the same GPU, which NCCL does not connect with itself"
        return None

    def take(self, output: Output) -> None:
        for pair in output.pair_ids:
            self._notify(pair.pair, kv.GpuPair(id=pair.unique_ids, ranks=len(self._engine.ready.gpus)))
        for number in output.pairs_up:
            session = self._sessions.get(number)
            if session is not None and session.pair_opened:
                session.pair_up_here = True
                self._use_if_up(session)
        for lost in output.pairs_lost:
            log.warning("KV of a lost GPU pair goes through the host: %s", lost.reason, extra={"event": "pair_lost"})
            self._notify(lost.pair, kv.GpuPair(lost=lost.reason))
            if lost.pair in self._sessions:
                self.close(self._sessions[lost.pair])

    def changed(self, session: Session, pair: kv.GpuPair) -> None:
        """Act on a decode pod's message about its pair."""
        match pair.WhichOneof("state"):
            case "up" if session.pair_opened and not session.pair_up_there:
                session.pair_up_there = True
                self._use_if_up(session)
            case "lost" if session.pair_opened:
                extra = {"event": "pair_lost", "epoch": session.epoch}
                log.warning("the decode pod gets no KV from GPU to GPU: %s", pair.lost[:_MOST_REASON], extra=extra)
                self.close(session)
            case "room" if not session.pair_opened and 0 < session.pairs_opened < _MOST_OPENED:
                session.pair_wanted = True
                self._open_wanted()
            case "up" | "lost" if not session.pair_opened:
                pass  # about a pair that this end has lost in the meantime
            case _:
                self._refuse(session)

    def credit(self, session: Session, pieces: int) -> None:
        """Send up to this many more pieces. Credit for a pair that was lost in the meantime is ignored."""
        if session.gpu_credit is None or not 0 < pieces <= _MOST_CREDIT:
            self._refuse(session)
        elif session.pair_opened:
            self._engine.send(GrantPair(session.id, pieces))

    def close(self, session: Session) -> None:
        """End a session's pair, if it has one, and open a pair that had to wait for room."""
        session.pair_wanted = session.pair_up_here = session.pair_up_there = False
        if session.pair_opened:
            session.pair_opened = False
            self._engine.send(ClosePair(session.id))
            self._open_wanted()

    def _open_wanted(self) -> None:
        sessions: Iterable[Session] = self._sessions.values()
        room = self._engine.ready.gpu_pairs - sum(session.pair_links for session in sessions if session.pair_opened)
        for session in [session for session in sessions if session.pair_wanted]:
            if session.pair_links <= room:
                room -= session.pair_links
                session.pair_wanted, session.pair_opened = False, True
                session.pairs_opened += 1
                self._engine.send(OpenPair(session.id, session.gpu_ranks))

    def _use_if_up(self, session: Session) -> None:
        """Send KV over a session's pair once both ends are up."""
        if session.pair_up_here and session.pair_up_there:
            self._engine.send(UsePair(session.id, session.gpu_checked, session.gpu_credit))
            extra = {"event": "paired", "transport": "nccl", "epoch": session.epoch}
            log.info("KV for the decode pod of epoch %d goes from GPU to GPU from now on", session.epoch, extra=extra)

    def _refuse(self, session: Session) -> None:
        """Count an invalid message, and end the pair of the decode pod that sent it."""
        self._events["refused_announcement"] += 1
        if session.pair_opened:
            self._notify(session.id, kv.GpuPair(lost="a message about the pair of GPUs was not valid"))
        self.close(session)

    def _notify(self, number: int, pair: kv.GpuPair) -> None:
        session = self._sessions.get(number)
        if session is not None and session.pair_opened:
            session.control.put_nowait(kv.PrefillToDecode(gpu_pair=pair))
