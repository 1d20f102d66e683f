"""The results of an engine's step."""

import msgspec

from .delta import Delta, Reservation
from .exports import Export


class StepResult(msgspec.Struct):
    """The results of a step. Without progress, the next step will have none either, unless something changes."""

    progress: bool = False
    deltas: list[Delta] = []
    reservations: list[Reservation] = []
    exports: list[Export] = []
    rejections: list[tuple[int, str, str]] = []  # (id, field, message) of requests that failed after they were added
    broken: list[int] = []  # requests that have ended because the model computed a value that is not finite
