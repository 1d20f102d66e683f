"""Sends the results of steps from the last stage of a pipeline to the engine process."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from baton_engine.executor import Launched
from baton_engine.results import Results

from .ring import RingWriter

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Results)


class ResultsSender:
    """Sends the results of steps in the order in which they were put. A thread waits for a GPU's steps, so that the
    process can launch the next one meanwhile."""

    def __init__(self, ring: RingWriter, failed: Callable[[Exception], None]) -> None:
        """failed: called in the thread when a step fails."""
        self._ring, self._failed = ring, failed
        self._steps: SimpleQueue[Launched | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="results", daemon=True)
        self._thread.start()

    def put(self, step: Launched) -> None:
        """Send the results of a step once they are known. All its draws must have been launched."""
        self._steps.put(step)

    def stop(self) -> None:
        """Send what was put, and end the thread."""
        self._steps.put(None)
        self._thread.join()

    def _send(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._ring.send(encode_results(step.wait()))
            except Exception as error:
                self._failed(error)


def encode_results(results: Results) -> bytes:
    return _encoder.encode(results)


def decode_results(data: bytes) -> Results:
    return _decoder.decode(data)
