"""Predicts the TTFT of a request on a pod from the pod's known load and rates."""

from dataclasses import dataclass

from .pods import Pod


@dataclass(frozen=True, slots=True)
class CostModel:
    """The parameters of the prediction. Times are in seconds, rates in tokens or bytes a second.

    TTFT = queued prefill work / rate + prefill of the uncached tokens + transfer of the KV + wait on the decode pod.
    Work is counted in tokens without context (Pod.prompt_work).
    """

    default_prefill_rate: float = 10_000.0  # for a pod until it or this gateway has measured its rate
    slowest_prefill_rate: float = (
        200.0  # in `longest_prefill`, for a pod without a known rate, which may compute on a CPU
    )
    prefill_margin: float = 3.0  # a prefill may take this many times the predicted time
    transfer_rate: float = 2e9  # to a decode pod that has not reported a hand-over yet
    handover_s: float = 0.003  # the part of a hand-over that does not depend on its size
    request_s: float = 0.001  # wait that each request decoding on a pod adds for a new one
    turnover_s: float = 10.0  # time in which all blocks of a full pod become free
    # Seconds of TTFT that count as much as one second of delay to one running decode. With more, prompts queue on
    # prefill pods while decode pods have none to compute: in simulations, the p99 of TTFT of one prefill and one decode
    # pod is up to 1.5 times that of two decode pods at 0.4, and 1.05 times at 0.15. With less, more answers wait for
    # prompts.
    decode_delay: float = 0.15
    max_busy_share: float = 0.9  # upper bound of the share of the time that a pod counts as busy

    def prefill_rate(self, pod: Pod) -> float:
        """Return a pod's prefill rate in tokens without context per second."""
        return pod.prefill_rate or pod.learned_rate or self.default_prefill_rate

    def prefill(self, pod: Pod, num_tokens: int, cached: int = 0) -> float:
        """Return the seconds that a pod takes for `num_tokens` tokens of a new prompt, including the wait in its queue.

        The pod runs the prompt before longer ones, but not before the end of the current step. cached: tokens of the
        prompt that come before the computed ones.
        """
        load, work = pod.prefill_tokens.load, pod.prompt_work(num_tokens, cached)
        if load > work and pod.step_tokens:
            load = min(load, pod.prefill_tokens.ahead_of(work) + pod.step_tokens)
        return (load + work) / self.prefill_rate(pod)

    def longest_prefill(self, pod: Pod, work: int) -> float:
        """Return the most seconds that a working pod, however busy, may take for this much work."""
        return self.prefill_margin * work / (pod.prefill_rate or pod.learned_rate or self.slowest_prefill_rate)

    def price(self, pod: Pod) -> float:
        """Return the price of a second of prefill on a pod, which includes the delay of later requests.

        A second of work on a pod delays the requests that arrive until the pod is idle again. It becomes idle after 1 /
        (1 - busy share) seconds (the busy period of M/G/1: Kleinrock, Queueing Systems 1, 5.8).
        """
        return 1 / (1 - min(pod.busy_share, self.max_busy_share))

    def transfer(self, pod: Pod, num_tokens: int) -> float:
        """Return the seconds from the first token until the KV of `num_tokens` tokens is on a decode pod."""
        if pod.handover_token_s is not None:
            return num_tokens * pod.handover_token_s
        return self.handover_s + num_tokens * pod.token_bytes / self.transfer_rate

    def decode_wait(self, pod: Pod, num_tokens: int) -> float:
        """Return the seconds until a request gets blocks for `num_tokens` new tokens of KV, and a place in a step."""
        wait = pod.requests.load * self.request_s
        if pod.block_size:
            short = pod.blocks_for(num_tokens) - (pod.num_blocks - pod.blocks_held)
            if short > 0:
                wait += self.turnover_s * short / max(pod.num_blocks, 1)
        return wait

    def local_prefill(self, pod: Pod, num_tokens: int, cached: int = 0) -> float | None:
        """Return the price of a prefill on a decode pod, which includes the delay of the requests that decode there.

        None when the pod's rate is not measured.
        """
        if not pod.prefill_rate:
            return None
        delay = self.decode_delay * pod.requests.load * pod.prompt_work(num_tokens, cached) / pod.prefill_rate
        return self.prefill(pod, num_tokens, cached) * self.price(pod) + delay
