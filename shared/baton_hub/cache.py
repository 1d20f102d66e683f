"""The cache of Hugging Face's own tools. Its layout is documented, so that they and Baton can share files.

https://huggingface.co/docs/huggingface_hub/guides/manage-cache: a repository has `blobs`, named by hash, and for each
commit a folder below `snapshots` with links to them. Baton adds `listings`, the hub's listing of each commit.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from huggingface_hub import constants

from .client import Stopped
from .errors import HubError
from .listing import Listing, RemoteFile
from .model_id import HubModel, is_commit

_POLL_S = 0.2


class Cache:
    """The part of a cache that belongs to one repository. root: the folder of the cache, by default HF_HUB_CACHE."""

    def __init__(self, model: HubModel, root: Path | None) -> None:
        self.root = root or Path(constants.HF_HUB_CACHE)
        name = f"models--{model.repo.replace('/', '--')}"
        self.folder = self.root / name
        self._locks = self.root / ".locks" / name
        self._ref = self.folder / "refs" / model.revision

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def known_commit(self, model: HubModel) -> str | None:
        """Return the commit that a revision had when the hub was last asked; None if it never was."""
        if model.pinned:
            return model.revision
        with contextlib.suppress(OSError, ValueError):
            commit = self._ref.read_text().strip()
            return commit if is_commit(commit) else None
        return None

    def listing(self, commit: str) -> Listing | None:
        try:
            return msgspec.json.decode(self._listing(commit).read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def remember(self, listing: Listing, model: HubModel) -> None:
        """Store a listing, and the commit of the revision, for use when the hub is not asked."""
        with contextlib.suppress(OSError):  # a cache that is complete may be read-only
            self.snapshot(listing.commit).mkdir(parents=True, exist_ok=True)
            _write(self._listing(listing.commit), msgspec.json.encode(listing))
            if not model.pinned:
                _write(self._ref, listing.commit.encode())

    def holds(self, file: RemoteFile, commit: str) -> bool:
        return _has_size(self.snapshot(commit) / file.name, file.size)

    def has_blob(self, file: RemoteFile) -> bool:
        return _has_size(self._blob(file), file.size)

    def partial(self, file: RemoteFile) -> Path:
        """Return the path of the part of a file that has been downloaded."""
        return self._blob(file).with_suffix(".incomplete")

    def partial_size(self, file: RemoteFile) -> int:
        try:
            return min(self.partial(file).stat().st_size, file.size)
        except OSError:
            return 0

    def complete(self, file: RemoteFile, descriptor: int) -> None:
        """Turn a partial file into the blob. descriptor: of the partial file, which is complete."""
        named = self._blob(file).with_name(f".{uuid.uuid4().hex}")
        try:
            # Where locks do not work, the partial file's name may be that of another process's file by now. So the open
            # file is linked. Without a folder's descriptor, os.link would link the symbolic link in /proc.
            os.link(f"/proc/self/fd/{descriptor}", named, src_dir_fd=descriptor)
        except OSError:  # there are no links, or another process has discarded the partial file
            with contextlib.suppress(FileNotFoundError):
                if self._is_partial(file, descriptor):
                    os.replace(self.partial(file), self._blob(file))
        else:
            os.replace(named, self._blob(file))
            named.unlink(missing_ok=True)  # it is left where the blob is the same file already
            with contextlib.suppress(FileNotFoundError):
                if self._is_partial(file, descriptor):
                    self.discard(file)
        if not self.has_blob(file):
            raise HubError(f"another process took {file.name} out of the cache {self.root}; start again")

    def _is_partial(self, file: RemoteFile, descriptor: int) -> bool:
        return os.path.samestat(os.fstat(descriptor), self.partial(file).stat())

    def discard(self, file: RemoteFile) -> None:
        self.partial(file).unlink(missing_ok=True)

    def place(self, file: RemoteFile, commit: str) -> None:
        """Make a blob appear under the name of its file in the snapshot of a commit."""
        path = self.snapshot(commit) / file.name
        path.parent.mkdir(exist_ok=True)
        link = path.with_name(f".{uuid.uuid4().hex}")
        try:
            link.symlink_to(os.path.relpath(self._blob(file), path.parent))
        except OSError:  # a file system without links
            link = self._blob(file)
        os.replace(link, path)

    @contextlib.contextmanager
    def locked(self, file: RemoteFile, stop: threading.Event, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of a blob against other threads, processes and, on most shared storage, pods.

        waiting: called once if another holder has it. The lock only saves bandwidth: two downloads of a blob write the
        same bytes to the same offsets, and each checks what it has received. So file systems without working locks do
        no harm. The kernel frees the lock of a killed process.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        with (self._locks / f"{file.hash}.baton").open("ab") as lock:
            first = True
            while not _try_lock(lock.fileno()):
                if first:
                    waiting()
                first = False
                if stop.wait(_POLL_S):
                    raise Stopped
            yield

    def prepare(self, needed: int) -> None:
        """Make the folders. needed: bytes that are still to be written. Raises HubError when the disk is too small."""
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._blobs).free
        except OSError as error:
            raise HubError(f"the cache {self.root} cannot be used ({error.strerror})") from None
        if needed > free:
            raise HubError(f"the disk of {self.root} has {size_text(free)} left, and {size_text(needed)} are needed")

    @property
    def _blobs(self) -> Path:
        return self.folder / "blobs"

    def _blob(self, file: RemoteFile) -> Path:
        return self._blobs / file.hash

    def _listing(self, commit: str) -> Path:
        return self.folder / "listings" / f"{commit}.json"


def size_text(size: int) -> str:
    """Return a number of bytes as text, in the decimal units of hubs and disks."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size:,} bytes"


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    return True


def _write(path: Path, content: bytes) -> None:
    """Write a small file so that others see either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
