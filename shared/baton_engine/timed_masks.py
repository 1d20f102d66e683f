"""Masks of grammars that clients write, computed in threads of their own, which give up when one takes too long.

The parser of llguidance compares all items of a row with each other, and checks its limits when the row is complete.
Where rules refer to themselves at their ends, a single row may have an item for each rule and token of the output,
which takes minutes with a few hundred rules. No step of the engine may wait for that.
"""

import threading
import time
from concurrent.futures import Future, wait
from queue import SimpleQueue

import numpy as np

from .matcher import Matcher

# Usual masks take a few milliseconds, and the slowest that the parser's limits allow half a second.
_MOST_SECONDS = 0.75
# After a mask that took longer, its salt has no more of them for so long. So a tenant that sends one such grammar after
# another delays the steps of all by a hundredth.
_REST_SECONDS = 60.0
# Threads that compute masks, and threads that go on with masks that nothing waits for any more, as the library cannot
# be stopped. A device needs the other cores.
_MOST_THREADS = 4
_MOST_GIVEN_UP = 4


class _Task:
    """A mask to be filled. `begun` is the time at which a thread began with it, 0 = none has."""

    def __init__(self, matcher: Matcher, salt: bytes, mask: np.ndarray) -> None:
        # A thread goes on with a mask that was given up, while the others of the step are in use elsewhere.
        self.matcher, self.salt, self.mask, self.filled = matcher, salt, mask, mask.copy()
        self.begun = 0.0
        self.given_up = False
        self.done: Future[None] = Future()


class TimedMasks:
    """Threads that fill masks. A matcher whose mask takes too long fails, and its salt is refused for a while."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._threads = self._given_up = 0
        self._refused: dict[bytes, float] = {}  # until when
        self._lock = threading.Lock()

    def refuses(self, salt: bytes) -> bool:
        """Whether no mask is computed for a salt at present."""
        return self._given_up >= _MOST_GIVEN_UP or time.monotonic() < self._refused.get(salt, 0.0)

    def begin(self, wanted: list[tuple[Matcher, bytes, np.ndarray]]) -> list[_Task]:
        """Have threads fill masks, each for a matcher and its salt, as Matcher.fill does. A matcher of a refused salt
        fails instead."""
        tasks = []
        for matcher, salt, mask in wanted:
            if self.refuses(salt):
                matcher.give_up()
            else:
                tasks.append(_Task(matcher, salt, mask))
        if tasks:
            self._start_threads()
        for task in tasks:
            self._tasks.put(task)
        return tasks

    def end(self, tasks: list[_Task]) -> None:
        """Wait until all masks are filled. Those of matchers that fail stay as they were."""
        waiting = tasks
        while waiting:
            now = time.monotonic()
            begun = [task.begun for task in waiting if task.begun]
            wait([task.done for task in waiting], max(min(begun, default=now) + _MOST_SECONDS - now, 0.001))
            self._give_up(waiting)
            waiting = [task for task in waiting if not task.given_up and not task.done.done()]
        for task in tasks:
            if not task.given_up:
                task.done.result()
                task.mask[:] = task.filled

    def _give_up(self, tasks: list[_Task]) -> None:
        """Give up the masks that take too long, and all others of their salts."""
        with self._lock:
            now = time.monotonic()
            left = [task for task in tasks if not task.done.done()]
            late = {task.salt for task in left if task.begun and now - task.begun >= _MOST_SECONDS}
            for task in left:
                if task.salt in late:
                    task.given_up = True
                    task.matcher.give_up()
                    if task.begun:
                        self._given_up += 1
                        self._threads -= 1
            self._refused = {salt: until for salt, until in self._refused.items() if until > now}
            self._refused |= dict.fromkeys(late, now + _REST_SECONDS)
        # Tasks of other salts may wait behind those that were given up.
        self._start_threads()

    def _start_threads(self) -> None:
        while self._threads < _MOST_THREADS:
            self._threads += 1
            # A process does not wait for these threads when it ends.
            threading.Thread(target=self._work, name="timed-masks", daemon=True).start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            with self._lock:
                if task.given_up:
                    continue
                task.begun = time.monotonic()
            error = None
            try:
                task.matcher.fill(task.filled)
            except Exception as raised:
                error = raised
            with self._lock:
                task.done.set_exception(error) if error else task.done.set_result(None)
                if task.given_up:
                    self._given_up -= 1
                    return
