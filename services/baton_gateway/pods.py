"""What the gateway knows of one worker pod: plain state, which others keep up to date."""

from dataclasses import dataclass


@dataclass(slots=True)
class Pod:
    """A decode or prefill pod.

    Load is counted in requests for a decode pod and in tokens waiting for prefill for a prefill pod.
    """

    address: str
    reporting: bool = False  # its Watch stream is up
    connected: bool = True  # its Serve stream is open; prefill pods have none
    draining: bool = False
    revision: str = ""
    fingerprint: str = ""  # of weights and KV layout
    max_model_len: int = 0
    vocab_size: int = 0
    charged: int = 0  # load sent there from here and not done yet
    reported: int = 0  # load in its last report, from all gateways
    charged_at_report: int = 0
    dispatched: int = 0  # how often it was chosen

    @property
    def live(self) -> bool:
        return self.reporting and self.connected and not self.draining

    @property
    def load(self) -> int:
        """Reported load, corrected at once by what was sent and what ended here since that report."""
        return max(self.charged, self.reported + self.charged - self.charged_at_report)

    def report(self, load: int) -> None:
        self.reported = load
        self.charged_at_report = self.charged


@dataclass(frozen=True, slots=True)
class Limits:
    """What pods can take. max_model_len: tokens of prompt and output together."""

    max_model_len: int
    vocab_size: int
