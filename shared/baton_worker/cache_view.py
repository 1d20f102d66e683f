"""The RPC process's copy of the keys in the engine's prefix cache, and the changes not sent to watchers yet."""

from collections.abc import Iterable

from baton_common.set_changes import SetChanges


class CacheView:
    """The keys of all cached blocks, as of the engine's last message."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._watchers: set[SetChanges[int]] = set()

    def update(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Apply the changes that the engine reports."""
        for key in lost:
            self._keys.discard(key)
            for changes in self._watchers:
                changes.lose(key)
        for key in gained:
            self._keys.add(key)
            for changes in self._watchers:
                changes.gain(key)

    def watch(self) -> SetChanges[int]:
        """Return the changes for a new watcher: at first all keys, then every change from now on."""
        changes = SetChanges(self._keys)
        self._watchers.add(changes)
        return changes

    def leave(self, changes: SetChanges[int]) -> None:
        """Stop collecting changes for a watcher that has ended."""
        self._watchers.discard(changes)
