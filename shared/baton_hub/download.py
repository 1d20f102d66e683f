"""Downloads one file: resumes an earlier download, and accepts only content with the right hash.

After a kill, hf_hub_download of huggingface_hub (2.4) restarts each file, also with hf_xet, and it checks only sizes.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from .cache import Cache
from .client import HubClient
from .errors import HubError
from .listing import RemoteFile

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK = 1 << 20  # bytes

# Called with the number of bytes by which a file has grown since the last call; negative if it has shrunk.
Advance = Callable[[int], None]


class Download:
    """Downloads files of one commit into a cache. May be used by several threads."""

    def __init__(self, client: HubClient, cache: Cache, commit: str) -> None:
        self._client = client
        self._cache = cache
        self._commit = commit

    def fetch(self, file: RemoteFile, advance: Advance, waiting: Callable[[], None]) -> None:
        """Bring a file into the snapshot. waiting: called if another process downloads it. Raises HubError, Stopped."""
        if self._cache.has_blob(file):
            advance(file.size)
        else:
            with self._cache.locked(file, self._client.stop, waiting):
                if self._cache.has_blob(file):
                    advance(file.size)
                else:
                    self._download(file, advance)
        self._cache.place(file, self._commit)

    def _download(self, file: RemoteFile, advance: Advance) -> None:
        while not self._complete(file, advance):
            # Perhaps only the earlier part was damaged, for example by a crash of the machine.
            advance(-file.size)

    def _complete(self, file: RemoteFile, advance: Advance) -> bool:
        """Complete a partial file. Return whether its hash is right; otherwise the file is discarded.

        Raises HubError if the hash is wrong although this call has downloaded all of the content.
        """
        hasher = file.hasher()
        with open(os.open(self._cache.partial(file), os.O_RDWR | os.O_CREAT, 0o644), "r+b") as partial:
            present = _hash_partial(partial, hasher, file.size)
            advance(present)
            partial.seek(present)
            for chunk in self._client.chunks(file.name, self._commit, present, file.size, file.size):
                partial.write(chunk)
                hasher.update(chunk)
                advance(len(chunk))
            if hasher.hexdigest() == file.hash:
                partial.flush()
                # A file under its final name must be complete even after a crash of the machine.
                os.fsync(partial.fileno())
                self._cache.complete(file, partial.fileno())
                return True
        self._cache.discard(file)
        if present == 0:
            kind = "SHA-256" if len(file.hash) == 64 else "Git object id"
            raise HubError(
                f"{file.name} of {self._client.model.repo} was refused: its {kind} is {hasher.hexdigest()}, "
                f"but the hub lists {file.hash}"
            )
        return False


def _hash_partial(partial: BinaryIO, hasher: "_Hash", size: int) -> int:
    """Cut a partial file to at most `size` bytes and hash its content. Return the number of its bytes."""
    # Another process may be writing to the file, so that a smaller size is out of date at once.
    if os.fstat(partial.fileno()).st_size > size:
        partial.truncate(size)
    partial.seek(0)
    present = 0
    while chunk := partial.read(_CHUNK):
        hasher.update(chunk)
        present += len(chunk)
    return present
