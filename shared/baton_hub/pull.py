"""Brings a model's files into the cache: lists them on the hub, and downloads those that are needed and missing."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from .cache import Cache, size_text
from .client import HubClient
from .download import Download
from .errors import HubError, HubUnreachable
from .listing import Listing, RemoteFile, fetch_listing
from .model_id import HubModel
from .selection import INDEX, text_files, weight_files

_FILES_AT_ONCE = 8


class Progress(Protocol):
    """Shows a download. Its methods may be called by any thread."""

    def expect(self, count: int) -> None:
        """Add bytes to the total."""

    def advance(self, count: int) -> None:
        """Add bytes, or take some away if `count` is below 0, to or from those that are there."""

    def say(self, text: str) -> None:
        """Show a sentence."""


@dataclass(frozen=True)
class Pulled:
    """A model in the cache. folder: the model folder."""

    folder: Path
    commit: str


def pull(
    model: HubModel,
    progress: Progress,
    *,
    root: Path | None = None,
    weights: bool = True,
    volume_size: int | None = None,
) -> Pulled:
    """Bring the files that Baton reads of a model into a cache, and return where they are. Raises HubError.

    root: the folder of the cache; by default that of huggingface_hub. weights: False = only the files for gateways.
    volume_size: bytes that the cache may hold if the disk itself is larger, as with an emptyDir of Kubernetes.
    An interrupted call leaves partial files, which the next call completes.
    """
    cache = Cache(model, root)
    try:
        return _Pull(model, progress, cache, weights, volume_size).run()
    except OSError as error:
        raise HubError(f"the cache {cache.root} cannot be used ({error.strerror or error})") from None


class _Pull:
    def __init__(
        self, model: HubModel, progress: Progress, cache: Cache, weights: bool, volume_size: int | None
    ) -> None:
        self._model = model
        self._progress = progress
        self._cache = cache
        self._weights = weights
        self._volume_size = volume_size
        self._stop = threading.Event()
        self._client = HubClient(model, self._stop)

    def run(self) -> Pulled:
        try:
            listing = self._listing()
        except HubUnreachable:
            if (found := self._found()) is None:
                raise
            return found
        names = text_files(listing.files)
        if "config.json" not in names:
            raise HubError(f"{self._model} has no config.json, so it is no model that Baton can serve")
        if self._weights and INDEX in listing.files:
            names.append(INDEX)
        files = listing.pick(names)
        self._fetch(files, listing.commit, files)
        snapshot = self._cache.snapshot(listing.commit)
        if self._weights:
            tensors = listing.pick(weight_files(listing.files, _index(snapshot)))
            self._fetch(tensors, listing.commit, [*files, *tensors])
        return Pulled(snapshot, listing.commit)

    def _listing(self) -> Listing:
        """Return the hub's listing, or the cached one if the listing cannot change or the hub cannot be reached."""
        commit = self._cache.known_commit(self._model)
        known = self._cache.listing(commit) if commit is not None else None
        if known is not None and self._model.pinned:
            return known
        try:
            listing = fetch_listing(self._client)
        except HubUnreachable as error:
            if known is None:
                raise
            self._progress.say(f"{error}; going on with commit {known.commit}, which the cache lists")
            return known
        self._cache.prepare(0)
        self._cache.remember(listing, self._model)
        return listing

    def _found(self) -> Pulled | None:
        """Return a model that another tool has downloaded, which has left no listing; None if the cache has none."""
        commit = self._cache.known_commit(self._model)
        if commit is None:
            return None
        snapshot = self._cache.snapshot(commit)
        names = [path.name for path in snapshot.iterdir() if path.exists()] if snapshot.is_dir() else []
        try:
            if "config.json" not in names or (self._weights and not weight_files(names, _index(snapshot))):
                return None
        except HubError:
            return None
        return Pulled(snapshot, commit)

    def _fetch(self, files: list[RemoteFile], commit: str, all_files: list[RemoteFile]) -> None:
        """Download what the cache lacks of some files. all_files: those that the volume will hold afterwards."""
        missing = [file for file in files if not self._cache.holds(file, commit)]
        self._progress.expect(_size(files))
        self._progress.advance(_size(files) - _size(missing))
        if not missing:
            return
        if self._volume_size is not None and _size(all_files) > self._volume_size:
            sizes = f"takes {size_text(_size(all_files))}, and the volume holds {size_text(self._volume_size)}"
            raise HubError(f"{self._model} {sizes}")
        absent = [file for file in missing if not self._cache.has_blob(file)]
        self._cache.prepare(sum(file.size - self._cache.partial_size(file) for file in absent))
        download = Download(self._client, self._cache, commit)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            # The largest files come first, so that no single one is left over at the end.
            tasks = [
                threads.submit(download.fetch, file, self._progress.advance, partial(self._waiting, file))
                for file in sorted(missing, key=lambda file: -file.size)
            ]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:  # an interrupt by the user, too
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _waiting(self, file: RemoteFile) -> None:
        self._progress.say(f"another process is downloading {file.name}; waiting for it")


def _size(files: list[RemoteFile]) -> int:
    return sum(file.size for file in files)


def _index(snapshot: Path) -> bytes | None:
    path = snapshot / INDEX
    return path.read_bytes() if path.exists() else None
