"""How long a request would take to its first token on a pod. Pure functions of what is known of the pod."""

from dataclasses import dataclass

from .pods import Pod


@dataclass(frozen=True, slots=True)
class CostModel:
    """Its numbers; times are in seconds, rates in tokens or bytes a second.

    TTFT = queued prefill tokens / rate + prefill of what is not cached + transfer of the KV + wait on the decode pod.
    """

    default_prefill_rate: float = 10_000.0  # of pods that have not measured theirs, until one is seen
    slowest_prefill_rate: float = 200.0  # that a pod without a known rate may have: it may compute on a CPU
    prefill_margin: float = 3.0  # how much longer than predicted a prefill may take
    transfer_rate: float = 2e9  # to a decode pod that has not handed over anything yet
    handover_s: float = 0.003  # of a hand-over, whatever its size
    request_s: float = 0.001  # what each request that decodes there adds to the wait of a new one
    turnover_s: float = 10.0  # in which a full pod gets all its blocks back
    # A second of delay to one running decode counts as so many seconds of TTFT.
    decode_delay: float = 0.4
    most_busy: float = 0.9  # share of the time that a pod counts as busy at most

    def prefill_rate(self, pod: Pod) -> float:
        """Return how many prompt tokens a pod computes in a second."""
        return pod.prefill_rate or pod.learned_rate or self.default_prefill_rate

    def prefill(self, pod: Pod, num_tokens: int) -> float:
        """Return the time until a pod has computed so many tokens of a new prompt, behind what is queued there.

        Longer prompts let it pass, after the step that the pod is at.
        """
        load = pod.prefill_tokens.load
        if load > num_tokens and pod.step_tokens:
            load = min(load, pod.prefill_tokens.ahead_of(num_tokens) + pod.step_tokens)
        return (load + num_tokens) / self.prefill_rate(pod)

    def longest_prefill(self, pod: Pod, num_tokens: int) -> float:
        """Return how long computing so many tokens may take on a pod that works, however busy it is."""
        return self.prefill_margin * num_tokens / (pod.prefill_rate or pod.learned_rate or self.slowest_prefill_rate)

    def price(self, pod: Pod) -> float:
        """Return what a second of prefill on a pod counts as with the delay to those who come later.

        What is to be done and what comes meanwhile keep a pod busy for 1 / (1 - busy share) times as long as the first
        alone would (the busy period of M/G/1: Kleinrock, Queueing Systems 1, 5.8).
        """
        return 1 / (1 - min(pod.busy_share, self.most_busy))

    def transfer(self, pod: Pod, num_tokens: int) -> float:
        """Return how much later than its first token a decode pod has the KV of so many tokens from another pod."""
        if pod.handover_token_s is not None:
            return num_tokens * pod.handover_token_s
        return self.handover_s + num_tokens * pod.token_bytes / self.transfer_rate

    def decode_wait(self, pod: Pod, num_tokens: int) -> float:
        """Return the time until a request of so many new tokens of KV gets its blocks and its place in a step."""
        wait = pod.requests.load * self.request_s
        if pod.block_size:
            short = pod.blocks_for(num_tokens) - (pod.num_blocks - pod.blocks_held)
            if short > 0:
                wait += self.turnover_s * short / max(pod.num_blocks, 1)
        return wait

    def local_prefill(self, pod: Pod, num_tokens: int) -> float | None:
        """Return the price of a prefill on a decode pod, with the delay to what decodes there, too.

        None when the pod's rate is not measured.
        """
        if not pod.prefill_rate:
            return None
        delay = self.decode_delay * pod.requests.load * num_tokens / pod.prefill_rate
        return self.prefill(pod, num_tokens) * self.price(pod) + delay
