"""What the gateway knows of one worker pod: plain state, which others keep up to date."""

from collections import Counter
from dataclasses import dataclass, field

from .breaker import Breaker

LEAST_TOKENS_TO_LEARN = 64  # with fewer, the time to a first token says little about the rate
_NEWEST_SHARE = 0.2
_NEWEST_ARRIVAL = 0.02


@dataclass(slots=True)
class InFlight:
    """An amount of work at a pod: what was sent from here and is not done, corrected by the pod's reports."""

    charged: int = 0  # sent there from here and not done yet
    reported: int = 0  # in the pod's last report, from all gateways
    charged_at_report: int = 0
    amounts: Counter[int] = field(default_factory=Counter)  # of the charges that are not done yet
    # Reported load, corrected at once by what was sent and what ended here since that report. Kept rather than computed
    # when asked for: a decision asks every pod.
    load: int = field(init=False)

    def __post_init__(self) -> None:
        self._settle()

    def charge(self, amount: int) -> None:
        """Note what is sent there, or, if negative, what ended."""
        self.charged += amount
        if amount:
            self.amounts[abs(amount)] += 1 if amount > 0 else -1
            if not self.amounts[abs(amount)]:
                del self.amounts[abs(amount)]
        self._settle()

    def ahead_of(self, amount: int) -> int:
        """Return the load less what was sent from here in larger amounts."""
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
    listed: bool = True  # it belongs to us; one that does not any more gets nothing new
    epoch: int = 0
    revision: str = ""
    fingerprint: str = ""  # of weights and KV layout
    max_model_len: int = 0
    vocab_size: int = 0
    block_size: int = 0  # tokens; 0 = not told
    num_blocks: int = 0
    blocks_held: int = 0  # in its last report
    prefill_rate: float = 0.0  # tokens a second, as the pod has measured it; 0 = not measured
    learned_rate: float = 0.0  # the same, as seen from here; 0 = nothing seen yet
    token_bytes: int = 0  # of KV; 0 = not told
    step_tokens: int = 0  # that it computes at a time; 0 = not told
    cache_scopes: bool = False  # it keeps apart what requests of different cache scopes leave in its prefix cache
    handed_over_tokens: int = 0  # in its last report, likewise the next
    exposed_handover_s: float = 0.0
    handover_token_s: float | None = None  # what handing a token's KV over adds to a prefill, of late; None = unknown
    requests: InFlight = field(default_factory=InFlight)  # those that decode there
    prefill_tokens: InFlight = field(default_factory=InFlight)  # those waiting for prefill
    busy_share: float = 0.0  # of late arrivals for which no pod was better, those that found it busy
    breaker: Breaker = field(default_factory=Breaker)
    dispatched: int = 0  # how often it was chosen

    @property
    def live(self) -> bool:
        return self.reporting and self.connected and self.listed and not self.draining

    def note_handovers(self, tokens: int, exposed_s: float) -> None:
        """Note what the pod reports of hand-overs since its start."""
        new, seconds = tokens - self.handed_over_tokens, exposed_s - self.exposed_handover_s
        if new >= LEAST_TOKENS_TO_LEARN:
            self.handed_over_tokens, self.exposed_handover_s = tokens, exposed_s
            self.handover_token_s = _learned(self.handover_token_s, seconds / new)

    def note_arrival(self) -> None:
        """Note that a request came for which no other prefill pod was better."""
        self.busy_share += _NEWEST_ARRIVAL * ((self.prefill_tokens.load > 0) - self.busy_share)

    def learn_rate(self, num_tokens: int, seconds: float) -> None:
        """Note that a prompt had its first token after so long, with so many tokens to compute, its own included."""
        if num_tokens < LEAST_TOKENS_TO_LEARN or seconds <= 0:
            return
        self.learned_rate = _learned(self.learned_rate or None, num_tokens / seconds)


def _learned(known: float | None, new: float) -> float:
    return new if known is None else known + _NEWEST_SHARE * (new - known)


@dataclass(frozen=True, slots=True)
class PodLimits:
    """What pods can take. max_model_len: tokens of prompt and output together."""

    max_model_len: int
    vocab_size: int
