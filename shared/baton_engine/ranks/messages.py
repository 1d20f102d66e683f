"""The messages between the engine process and the ranks."""

from typing import Any

import msgspec
import numpy as np

from baton_common.extent import Extent
from baton_engine.config import EngineConfig
from baton_engine.pairs.messages import PairCommand, Report
from baton_engine.step_plan import StepPlan


class Start(msgspec.Struct, tag=True):
    """Load a part of the model. rank: the number of the process. folder: for the files by which the ranks find each
    other. log_level: a level of logging."""

    config: EngineConfig
    rank: int
    folder: str
    log_level: int


class Alive(msgspec.Struct, tag=True):
    """The process has started."""


class Loaded(msgspec.Struct, tag=True):
    """The rank can run plans."""


class Failed(msgspec.Struct, tag=True):
    """The rank exits. in_settings: because the model or the settings cannot be served. of_others: because it lost the
    connection to another rank."""

    message: str
    in_settings: bool = False
    of_others: bool = False


class Reports(msgspec.Struct, tag=True):
    """Events at the rank's ends of pairs with other pods' GPUs."""

    reports: list[Report]


Reply = Alive | Loaded | Failed | Reports


class Launch(msgspec.Struct, tag=True):
    """drawn: rows, each with the token that was drawn for it in an earlier step, which the last stage alone knows."""

    plan: StepPlan
    drawn: list[tuple[int, int]] = []


class DrawMasked(msgspec.Struct, tag=True):
    """Launch the draws of the last plan that wait for masks. masks: as in Launched.draw_masked."""

    masks: np.ndarray


class Gather(msgspec.Struct, tag=True):
    """Write KV of this rank's heads into the memory for that, and confirm it. tables, extent: as in KvCache.gather."""

    tables: list[list[int]]
    extent: Extent


class Scatter(msgspec.Struct, tag=True):
    """Read KV of this rank's heads from the memory for that, and confirm it."""

    tables: list[list[int]]
    extent: Extent


class Stop(msgspec.Struct, tag=True):
    """Free the model, and wait for the next Start."""


Work = Launch | DrawMasked | Gather | Scatter | PairCommand
Command = Work | Stop


def _encode(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype == np.int32:
        return [array.shape, array.tobytes()]
    raise NotImplementedError(f"{type(array)} is in no command")


def _decode(kind: type, value: Any) -> Any:
    shape, data = value
    return np.frombuffer(data, dtype=np.int32).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_decode)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(data: bytes) -> Command:
    return _commands.decode(data)
