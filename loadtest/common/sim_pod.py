"""A worker pod on a simulated clock: one step after the other, as the engine does them, with a prefix cache of keys."""

import heapq
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from baton_common.set_changes import SetChanges
from baton_engine.scheduler import STRETCH


class Clock:
    """A simulated clock in seconds, and the events that are scheduled on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), do))

    def run(self) -> None:
        """Run all scheduled events in the order of their times."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


@dataclass(frozen=True)
class Speed:
    """The speed of a pod: prompt tokens a second, seconds of a decode step without and for each request, and the most
    prompt tokens in a step that also decodes and in one that does not."""

    prefill_rate: float
    step_s: float
    request_s: float
    chunk_tokens: int = 512
    most_tokens: int = 8192


@dataclass
class Work:
    """A request on a pod. keys: those of the full blocks of its prompt; output: the tokens that this pod generates."""

    num_tokens: int
    keys: Sequence[int]
    output: int
    prefilled: Callable[[], None] = lambda: None
    finished: Callable[[], None] = lambda: None
    cached: int | None = None  # cached prompt tokens, set when the request starts
    left: int = field(init=False)  # tokens to prefill
    due: int = 0  # its place in a pod's queue

    def __post_init__(self) -> None:
        self.left = self.num_tokens


class Cache:
    """At most `num_blocks` block keys. The least recently used are evicted first, even if a request holds them."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()
        self.changes: SetChanges[int] = SetChanges()

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of these blocks, counted from the first, are cached without a gap."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def put(self, keys: Sequence[int]) -> None:
        # The end of a prompt is evicted before its beginning.
        for key in reversed(keys[: self._num_blocks]):
            if key not in self._keys:
                self.changes.gain(key)
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self.changes.lose(self._keys.popitem(last=False)[0])


class SimPod:
    """Computes prompts in chunks, one after the other, beside all decodes. Shorter ones overtake as in the engine."""

    def __init__(self, clock: Clock, speed: Speed, block_size: int, num_blocks: int) -> None:
        self.cache = Cache(num_blocks)
        self.decoding: list[Work] = []
        self.queue: list[Work] = []
        self.busy_s = 0.0  # time spent in steps since the start
        self._admitted_tokens = 0
        self._clock = clock
        self._speed = speed
        self._block_size = block_size
        self._busy = False

    @property
    def queued_tokens(self) -> int:
        return sum(work.left for work in self.queue)

    def prefill(self, work: Work) -> None:
        """Compute a prompt, then generate its output. The step that ends the prompt also yields the first token."""
        work.due = self._admitted_tokens + STRETCH * work.num_tokens
        insort(self.queue, work, key=attrgetter("due"))
        self._step()

    def decode(self, work: Work) -> None:
        """Generate the output of a request whose prompt KV and first token were handed over."""
        self.cache.put(work.keys)
        self._goes_on(work)
        self._step()

    def _step(self) -> None:
        if self._busy or not (self.queue or self.decoding):
            return
        self._busy = True
        speed, decodes = self._speed, list(self.decoding)
        chunks = self._chunks(speed.chunk_tokens if decodes else speed.most_tokens)
        seconds = sum(count for _, count in chunks) / speed.prefill_rate
        if decodes:
            seconds += speed.step_s + speed.request_s * len(decodes)
        self.busy_s += seconds
        self._clock.at(self._clock.now + seconds, lambda: self._end_step(decodes, chunks))

    def _chunks(self, budget: int) -> list[tuple[Work, int]]:
        chunks = []
        for work in self.queue:
            if budget <= 0:
                break
            if work.cached is None:
                work.cached = self.cache.match(work.keys) * self._block_size
                work.left = work.num_tokens - work.cached
                self._admitted_tokens += work.num_tokens
            count = min(work.left, budget)
            budget -= count
            chunks.append((work, count))
        return chunks

    def _end_step(self, decodes: Sequence[Work], chunks: Sequence[tuple[Work, int]]) -> None:
        for work in decodes:
            work.output -= 1
            if not work.output:
                self.decoding.remove(work)
                work.finished()
        for work, count in chunks:
            work.left -= count
            if not work.left:
                self.queue.remove(work)
                self.cache.put(work.keys)
                work.prefilled()
                work.output -= 1
                self._goes_on(work)
        self._busy = False
        self._step()

    def _goes_on(self, work: Work) -> None:
        if work.output > 0:
            self.decoding.append(work)
        else:
            work.finished()
