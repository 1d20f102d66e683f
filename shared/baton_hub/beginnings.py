"""Reads the beginnings of a model's weight files on the hub, without downloading the files."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .client import HubClient
from .listing import RemoteFile, fetch_listing
from .model_id import HubModel
from .selection import INDEX, LARGEST_INDEX, weight_files

# Most headers are within this many bytes, so that one request for a file is enough.
_AHEAD = 128 << 10
_FILES_AT_ONCE = 8

T = TypeVar("T")
# Returns the next bytes of a file, at most so many, and fewer only where the file ends.
Read = Callable[[int], bytes]


def read_beginnings(model: HubModel, read_one: Callable[[RemoteFile, Read], T]) -> tuple[bytes | None, list[T]]:
    """Return the content of INDEX, None if there is none, and what `read_one` returns for each file of weights.

    model: its revision is a commit. read_one: called in threads. Raises HubError, also if there are no weights.
    """
    client = HubClient(model, threading.Event())
    listing = fetch_listing(client)
    # Of a file that is too large for an index, one byte too many is read, so that it is refused.
    index = _reader(client, listing.files[INDEX])(LARGEST_INDEX + 1) if INDEX in listing.files else None
    files = listing.pick(weight_files(listing.files, index))
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return index, list(threads.map(lambda file: read_one(file, _reader(client, file)), files))


def _reader(client: HubClient, file: RemoteFile) -> Read:
    """Return what reads a file from its first byte on."""
    ahead, received = b"", 0

    def read(count: int) -> bytes:
        nonlocal ahead, received
        if len(ahead) < count:
            first, received = received, min(received + max(count - len(ahead), _AHEAD), file.size)
            ahead += b"".join(client.chunks(file.name, client.model.revision, first, received, file.size))
        taken, ahead = ahead[:count], ahead[count:]
        return taken

    return read
