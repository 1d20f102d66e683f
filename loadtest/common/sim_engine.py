"""A worker pod on a simulated clock that plans its steps with the engine's own scheduler. Only the device is a formula.

Like an engine on a GPU, it schedules the next step while the device computes the current one.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton_common.kv_layout import LayerGroup
from baton_engine.block_allocator import BlockAllocator
from baton_engine.block_pool import BlockPool
from baton_engine.sampling import SamplingParams
from baton_engine.scheduler import Scheduler
from baton_engine.sequence import Request, Sequence, State
from baton_engine.step import Step
from baton_engine.step_sizes import StepSizes
from baton_engine.step_times import StepTimes, StepWork
from loadtest.common.sim_pod import Clock

BLOCK_SIZE = 64
# As in baton_engine/pipeline.py: the next step is planned so long before the predicted end of one with prompts, or of
# one of decodes, which are scheduled and launched in 1 to 2 ms.
_LEAD_S, _DECODES_LEAD_S, _LEAD_SHARE = 0.012, 0.002, 0.05
# Milliseconds of steps of the Llama-3.1-8B shape on an NVIDIA H200 by tokens, one of which is a decode and the others
# one prompt. They were measured one at a time; one after another they take _SUSTAINED times as long.
_LLAMA_8B_MS = {
    512: 11.5, 640: 14.4, 768: 17.3, 896: 19.0, 1024: 19.9, 1152: 26.6, 1280: 26.3, 1408: 30.4, 1536: 35.9, 1664: 37.9,
    1792: 36.5, 1920: 42.7, 2048: 41.4, 2176: 48.3, 2304: 55.9, 2432: 52.1, 2560: 52.5, 2688: 62.3, 2816: 61.8,
    2944: 62.1, 3072: 68.3, 3200: 77.2, 3328: 72.7, 3456: 81.4, 3584: 75.7, 3712: 80.6, 3840: 88.2, 3968: 89.3,
    4096: 86.0,
}  # fmt: skip
_SUSTAINED = 1.09
LLAMA_8B_S = {tokens: _SUSTAINED * ms / 1e3 for tokens, ms in _LLAMA_8B_MS.items()}


@dataclass(frozen=True)
class Device:
    """The seconds of steps, by default those of the Llama-3.1-8B shape in bfloat16 on an NVIDIA H200.

    A step with prompts takes prompt_step_s, token_s for each token and pair_s for each pair of a prompt token and a
    token that it sees. A step of decodes takes decode_step_s and decode_s for each. In both, key_s is added for each
    token that a decode sees. most_tokens: of a step. most_sequences: that run at once.

    sizes: measured seconds of steps with one prompt, by tokens. A step takes as long as the next larger one. They
    replace prompt_step_s and token_s for steps that are not smaller than all of them and not larger.
    """

    prompt_step_s: float = 4.0e-3
    token_s: float = 19.5e-6
    pair_s: float = 1.9e-9
    decode_step_s: float = 4.0e-3
    decode_s: float = 12.8e-6
    key_s: float = 131_072 / 4e12
    token_bytes: int = 131_072
    num_blocks: int = 12_000
    most_tokens: int = 8192
    most_sequences: int = 256
    sizes: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, work: StepWork) -> float:
        keys = work.keys * self.key_s
        if work.prompt_tokens:
            tokens = work.prompt_tokens + work.decodes
            attention = work.pairs * self.pair_s + keys
            size = next((size for size in self.sizes if size >= tokens), 0)
            if not size or tokens < min(self.sizes):
                return self.prompt_step_s + tokens * self.token_s + attention
            return self.sizes[size] - size * size / 2 * self.pair_s + attention
        return self.decode_step_s + work.decodes * self.decode_s + keys

    def times(self) -> StepTimes:
        """Return what an engine predicts after it has measured steps at its start."""
        works = [StepWork(size, size * (size + 1) // 2, 0, 0) for size in (512, 2048, self.most_tokens)]
        works += [StepWork(1024, 1024 * context, 0, 0) for context in (4096, 16_384)]
        works += [StepWork(1024, 1024 * 512, 64, 64 * length) for length in (64, 4096)]
        works += [StepWork(0, 0, count, count * length) for count in (1, 8, 64, 256) for length in (64, 4096)]
        times = StepTimes()
        times.begin([(work, self.seconds(work)) for work in works])
        times.sizes = StepSizes(dict(self.sizes))
        return times


@dataclass(eq=False)
class Job:
    """A request on a pod. output: tokens that the pod generates. token: called at each of them.

    limit: the most tokens that the request allows, if the pod cannot know how many the answer will have; 0 = it knows
    `output`.
    """

    num_tokens: int
    output: int
    token: Callable[[], None]
    finished: Callable[[], None] = lambda: None
    limit: int = 0
    sequence: Sequence = field(init=False)


class EnginePod:
    """An engine with its scheduler, on a device that takes the predicted time for each step. It has no prefix cache."""

    def __init__(
        self,
        clock: Clock,
        device: Device,
        chunk_ms: float,
        prefill_only: bool = False,
        make_scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        """chunk_ms, prefill_only: as EngineConfig has them. make_scheduler: the engine's, or one derived from it."""
        self.times = device.times()
        self.busy_s = 0.0  # time spent in steps since the start
        self._clock = clock
        self._device = device
        self._pool = BlockPool(device.num_blocks, False)
        allocator = BlockAllocator(self._pool, (LayerGroup(None, (0,)),), BLOCK_SIZE, device.most_tokens)
        self.scheduler = make_scheduler(
            allocator,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=device.most_tokens,
            max_num_seqs=device.most_sequences,
            max_export_blocks=device.num_blocks,
            chunk_tokens=round(chunk_ms / 1e3 / self.times.token_s),
            prefill_only=prefill_only,
            reach=lambda sequence, _cached: sequence.known if sequence.request.imports_kv else 0,
        )
        self.scheduler.context_cost, self.scheduler.step_cost = self.times.context_cost, self.times.step_cost
        self.scheduler.sizes = self.times.sizes
        self._ids = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._steps: deque[Step] = deque()  # the step that the device computes, and the next one
        self._woken = False

    @property
    def blocks_held(self) -> int:
        return self._pool.num_held

    @property
    def num_requests(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    @property
    def queued_work(self) -> float:
        """The work that is queued, as Engine.load computes it for the pod's reports."""
        scheduler = self.scheduler
        queued = [each for each in (*scheduler.running, *scheduler.waiting) if not each.imports]
        return sum(scheduler.work_left(each) for each in queued if each.computed + 1 < each.known)

    def prefill(self, job: Job, exports: bool = False) -> None:
        """Compute a prompt and generate the output. exports: only the first token; `release` frees the KV."""
        self._add(job, exports_from=0 if exports else None)

    def reserve(self, job: Job) -> None:
        """Give a request its blocks, into which a prefill pod's KV comes. Its first token counts as output."""
        self._add(job, imports_kv=True)
        self.scheduler.admit_imports()

    def decode(self, job: Job) -> None:
        """Go on with a request whose KV and first token have been handed over."""
        assert job.sequence.state is State.IMPORTING
        self.scheduler.end_import(job.sequence)
        job.sequence.append(0)
        if job.sequence.known >= job.sequence.most_tokens:
            self._finish(job)
            return
        self.scheduler.start(job.sequence)
        self._wake()

    def release(self, job: Job) -> None:
        """Free what a handed-over request holds."""
        self.scheduler.remove(job.sequence)
        del self._jobs[job.sequence.request.id]
        self._wake()

    def _add(self, job: Job, imports_kv: bool = False, exports_from: int | None = None) -> None:
        id = next(self._ids)
        most = job.limit or job.output
        sampling = SamplingParams(max_tokens=most, eos_token_ids=[1] if job.limit else [])
        request = Request(
            id=id, prompt=[0] * job.num_tokens, sampling=sampling, imports_kv=imports_kv, exports_from=exports_from
        )
        job.sequence = Sequence(request, id, BLOCK_SIZE, job.num_tokens + most)
        self._jobs[id] = job
        self.scheduler.add(job.sequence)
        self._wake()

    def _wake(self) -> None:
        """Plan a step if the device is idle. Requests that come at the same moment become part of it."""
        if not self._steps and not self._woken:
            self._woken = True
            self._clock.at(self._clock.now, self._begin)

    def _begin(self) -> None:
        self._woken = False
        if not self._steps and self._plan():
            self._run()

    def _plan(self) -> bool:
        step = self.scheduler.schedule()
        if step.sequences:
            self._steps.append(step)
        return bool(step.sequences)

    def _run(self) -> None:
        """Let the device compute the oldest step, and plan the next one at the engine's moment."""
        now, plan = self._clock.now, self._steps[0].plan
        seconds = self._device.seconds(StepWork.of(plan))
        self.busy_s += seconds
        lead = _LEAD_S if plan.has_prompts else _DECODES_LEAD_S
        next_s = max(seconds * (1 - _LEAD_SHARE) - lead, 0.0)
        self._clock.at(now + next_s, self._plan)
        self._clock.at(now + seconds, self._end)

    def _end(self) -> None:
        step = self._steps.popleft()
        # The device begins the next step, if there is one, before the results of this one are read.
        if self._steps:
            self._run()
        for sequence, draws in zip(step.sequences, step.plan.draws, strict=True):
            if draws and sequence.state is not State.FINISHED:
                self._append(self._jobs[sequence.request.id])
        if not self._steps:
            self._wake()

    def _append(self, job: Job) -> None:
        sequence = job.sequence
        sequence.append(0)
        job.token()
        if sequence.exports:
            self.scheduler.export(sequence)
        elif sequence.output_len >= job.output:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        if job.limit:
            self.scheduler.learn(job.output, job.output < job.limit)
        self.scheduler.remove(job.sequence)
        del self._jobs[job.sequence.request.id]
        job.finished()
