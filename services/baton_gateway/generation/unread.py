"""The tokens of a generation that its reader has not taken yet."""

from baton_proto import serving_pb2 as pb

from .answer_memory import AnswerMemory, size_of

_MERGED_TOKENS = 32  # held tokens are merged into deltas of about this many, which saves most of their memory


class Unread:
    """Deltas, each with the number of its choice, in the order of their arrival.

    tokens: how many have arrived and were not taken; those that were dropped count, too.
    """

    def __init__(self, memory: AnswerMemory, choices: int) -> None:
        """choices: so many held deltas are taken at a time."""
        self.tokens = 0
        self._memory = memory
        self._choices = choices
        self._deltas: list[tuple[int, pb.Delta]] = []
        self._merging: dict[int, pb.Delta] = {}  # the held delta of each choice that takes its next tokens
        self._being_written = 0  # bytes of held deltas that were taken and are not written to the client yet

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def put(self, choice: int, delta: pb.Delta) -> None:
        """Add a delta that is taken at once."""
        self.tokens += len(delta.token_ids)
        self._deltas.append((choice, delta))

    def hold(self, choice: int, delta: pb.Delta) -> None:
        """Add a delta that stays in memory for some time. The caller has counted its bytes."""
        held = self._merging.get(choice)
        if held is not None and len(held.token_ids) < _MERGED_TOKENS:
            self.tokens += len(delta.token_ids)
            held.MergeFrom(delta)
        elif delta.prompt.logprobs:
            self.put(choice, delta)  # copying them would take long
        else:
            # A copy, because a delta keeps the pod's whole message in memory, with the tokens of all other requests.
            self._merging[choice] = copy = pb.Delta()
            copy.CopyFrom(delta)
            self.put(choice, copy)

    def take(self) -> list[tuple[int, pb.Delta]]:
        """Return all deltas; if some were held, only the first ones, one of each choice on average: writing all of them
        at once would take much memory."""
        self._merging.clear()
        if not self._memory.unread:
            taken, self._deltas, self.tokens = self._deltas, [], 0
            return taken
        taken, self._deltas = self._deltas[: self._choices], self._deltas[self._choices :]
        self.tokens -= sum(len(delta.token_ids) for _, delta in taken)
        self._being_written = sum(size_of(delta) for _, delta in taken)
        return taken

    def note_written(self) -> None:
        """Note that the client has got what was taken."""
        self._memory.hold(-self._being_written)
        self._being_written = 0

    def drop(self) -> None:
        """Free the memory of all deltas that were not taken."""
        self._deltas.clear()
        self._merging.clear()
        self._memory.hold(self._being_written - self._memory.unread)
