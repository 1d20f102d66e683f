"""The state of one worker pod as the gateway knows it. Watchers, links and routes keep it up to date."""

from collections import Counter
from dataclasses import dataclass, field

from .breaker import Breaker

LEAST_TOKENS_TO_LEARN = 64  # with fewer, the time to a first token says little about the rate
_NEWEST_SHARE = 0.2
_NEWEST_ARRIVAL = 0.02


@dataclass(slots=True)
class InFlight:
    """An amount of work at a pod: the unfinished work that this gateway sent, corrected by the pod's reports."""

    charged: int = 0  # sent by this gateway and not finished
    reported: int = 0  # work of all gateways in the pod's last report
    charged_at_report: int = 0
    amounts: Counter[int] = field(default_factory=Counter)  # how many unfinished charges have each amount
    # The reported load, corrected by the charges made and released here since that report. It is kept up to date, not
    # computed on reading, because each routing decision reads it for every pod.
    load: int = field(init=False)

    def __post_init__(self) -> None:
        self._settle()

    def charge(self, amount: int) -> None:
        """Add work that is sent to the pod. A negative amount releases an earlier charge."""
        self.charged += amount
        if amount:
            self.amounts[abs(amount)] += 1 if amount > 0 else -1
            if not self.amounts[abs(amount)]:
                del self.amounts[abs(amount)]
        self._settle()

    def ahead_of(self, amount: int) -> int:
        """Return the load without this gateway's larger charges, because pods run shorter prompts first."""
        return max(self.load - sum(larger * count for larger, count in self.amounts.items() if larger > amount), 0)

    def report(self, load: int) -> None:
        """Note the load that the pod reports."""
        self.reported = load
        self.charged_at_report = self.charged
        self._settle()

    def _settle(self) -> None:
        self.load = max(self.charged, self.reported + self.charged - self.charged_at_report)


@dataclass(slots=True)
class Pod:
    """A decode or prefill pod."""

    address: str
    slot: int = 0  # its number in the prefix index
    reporting: bool = False  # its Watch stream is up
    connected: bool = True  # its Serve stream is open; prefill pods have none
    draining: bool = False
    listed: bool = True  # it still belongs to the pool; otherwise it gets no new requests
    epoch: int = 0
    revision: str = ""
    fingerprint: str = ""  # of weights and KV layout
    max_model_len: int = 0
    vocab_size: int = 0
    block_size: int = 0  # tokens; 0 = not reported
    num_blocks: int = 0
    table_windows: tuple[int, ...] = (0,)  # tokens that each block table of a request keeps; 0 = all
    blocks_held: int = 0  # in its last report
    prefill_rate: float = 0.0  # tokens without context per second, measured by the pod; 0 = not measured
    context_cost: float = 0.0  # part by which each token of context makes a prompt token take longer
    learned_rate: float = 0.0  # tokens without context per second, measured by this gateway; 0 = not measured
    token_bytes: int = 0  # bytes of KV per token; 0 = not reported
    step_tokens: int = 0  # most tokens of one engine step; 0 = not reported
    cache_scopes: bool = False  # its prefix cache keeps blocks of different cache scopes apart
    handed_over_tokens: int = 0  # the pod's total when handover_token_s was last updated
    exposed_handover_s: float = 0.0
    handover_token_s: float | None = None  # recent seconds that handing over one token adds; None = unknown
    requests: InFlight = field(default_factory=InFlight)  # requests that decode on this pod
    prefill_tokens: InFlight = field(default_factory=InFlight)  # waiting prompts, in the unit of prompt_work
    busy_share: float = 0.0  # share of recent arrivals best served here that found the pod busy
    breaker: Breaker = field(default_factory=Breaker)
    dispatched: int = 0  # how often it was chosen

    @property
    def live(self) -> bool:
        return self.reporting and self.connected and self.listed and not self.draining

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request of `num_tokens` tokens needs, including the block of its next token.

        The pod must have reported its block size.
        """
        kept = (min(num_tokens, window) if window else num_tokens for window in self.table_windows)
        return sum(tokens // self.block_size + 1 for tokens in kept)

    def prompt_work(self, num_tokens: int, cached: int = 0) -> int:
        """Return the work of prefilling num_tokens tokens of a prompt after `cached` ones, in tokens without context.

        A token takes longer the more context it has. Pods of older versions do not report how much longer.
        """
        return round(num_tokens * (1 + self.context_cost * (cached + num_tokens / 2)))

    def note_handovers(self, tokens: int, exposed_s: float) -> None:
        """Note the pod's hand-over totals since its start: tokens, and seconds that they added after first tokens."""
        new, seconds = tokens - self.handed_over_tokens, exposed_s - self.exposed_handover_s
        if new >= LEAST_TOKENS_TO_LEARN:
            self.handed_over_tokens, self.exposed_handover_s = tokens, exposed_s
            self.handover_token_s = _learned(self.handover_token_s, seconds / new)

    def note_arrival(self) -> None:
        """Note that a request came for which no other prefill pod was predicted to be better."""
        self.busy_share += _NEWEST_ARRIVAL * ((self.prefill_tokens.load > 0) - self.busy_share)

    def learn_rate(self, work: int, seconds: float) -> None:
        """Learn from a prompt that got its first token after `seconds`.

        work: all work of the pod until then, including the prompt, in the unit of prompt_work.
        """
        if work < LEAST_TOKENS_TO_LEARN or seconds <= 0:
            return
        self.learned_rate = _learned(self.learned_rate or None, work / seconds)


def _learned(known: float | None, new: float) -> float:
    return new if known is None else known + _NEWEST_SHARE * (new - known)


@dataclass(frozen=True, slots=True)
class PodLimits:
    """The limits of a request that pods can take. max_model_len: tokens of prompt and output together."""

    max_model_len: int
    vocab_size: int
