"""What the RPC process knows of the engine's prefix cache, and what each watcher has yet to hear of it."""

from collections.abc import Iterable

from baton_common.set_changes import SetChanges


class CacheView:
    """The keys of all cached blocks, as of the engine's last message."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._watchers: set[SetChanges[int]] = set()

    def update(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Take what the engine says has changed."""
        for key in lost:
            self._keys.discard(key)
            for changes in self._watchers:
                changes.lose(key)
        for key in gained:
            self._keys.add(key)
            for changes in self._watchers:
                changes.gain(key)

    def watch(self) -> SetChanges[int]:
        """Return what a new watcher has to hear: all keys, and from now on every change."""
        changes = SetChanges(self._keys)
        self._watchers.add(changes)
        return changes

    def leave(self, changes: SetChanges[int]) -> None:
        """Forget a watcher."""
        self._watchers.discard(changes)
