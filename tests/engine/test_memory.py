"""The share of a device's memory that the KV cache gets, and the errors when it is too little."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.device_sampler import DeviceSampler, Drawn
from baton_engine.draw_groups import RowDraw
from baton_engine.engine import Engine
from baton_engine.kv_cache import KvCache
from baton_engine.largest_steps import forward_steps, sampling_steps
from baton_engine.memory import (
    LIBRARIES_BYTES,
    Budget,
    KvShape,
    check_num_blocks,
    check_weights,
    choose_num_blocks,
    measure,
)
from baton_worker.pair_memory import PairMemory, plan

from .fake_cuda import pretend
from .harness import assert_idle, generate, make_prompt, make_request

GIB = 1 << 30
# 2 MiB a block, as Llama-3.1-8B has it.
SHAPE = KvShape(2 << 20, 16, 8192)
BUDGET = Budget(
    device="cuda:0",
    total=80 * GIB,
    free=60 * GIB,
    share=72 * GIB,
    weights=15 * GIB,
    forward=3 * GIB,
    sampling=GIB,
    graphs=GIB,
    libraries=GIB // 2,
)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(
        model="", **{"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 8192, "max_num_seqs": 256, **settings}
    )


def shortage(budget: Budget, shape: KvShape = SHAPE, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        choose_num_blocks(budget, shape, config(**settings), measured=True)
    return str(error.value)


def test_the_cache_gets_what_the_share_leaves() -> None:
    left = (72 - 15 - 3 - 1 - 1) * GIB - GIB // 2
    assert choose_num_blocks(BUDGET, SHAPE, config(), measured=True) == left // SHAPE.block_bytes


def test_memory_of_other_processes_is_not_counted_on() -> None:
    budget = msgspec.structs.replace(BUDGET, free=10 * GIB)
    assert budget.others == (80 - 10) * GIB - (15 + 3 + 1) * GIB - GIB // 2
    blocks = choose_num_blocks(budget, SHAPE, config(), measured=True)
    assert 8 * GIB > blocks * SHAPE.block_bytes > 7 * GIB


def test_no_more_blocks_than_sequences_can_fill() -> None:
    assert choose_num_blocks(BUDGET, SHAPE, config(max_num_seqs=3), measured=True) == 3 * 512


def test_a_device_that_is_not_measured_keeps_to_the_default() -> None:
    budget = Budget(device="cpu", total=80 * GIB, free=60 * GIB, share=80 * GIB, weights=15 * GIB)
    assert choose_num_blocks(budget, SHAPE, config(), measured=False) == 512
    assert choose_num_blocks(budget, KvShape(2 << 20, 16, 32_000), config(), measured=False) == 2000
    assert choose_num_blocks(budget, SHAPE, config(num_blocks=700), measured=False) == 700


def test_a_device_that_is_not_measured_keeps_half_of_a_small_memory_for_steps() -> None:
    shape = KvShape(1 << 16, 16, 512)
    budget = Budget(device="cpu", total=GIB, free=GIB // 2, share=GIB, weights=GIB // 8)
    blocks = choose_num_blocks(budget, shape, config(max_num_seqs=1000), measured=False)
    assert blocks == budget.for_kv // 2 // shape.block_bytes
    assert blocks * shape.block_bytes < GIB // 4
    # A sequence of the longest length must fit all the same.
    long = KvShape(1 << 16, 16, 16 * (blocks + 100))
    assert choose_num_blocks(budget, long, config(), measured=False) == blocks + 100


def test_blocks_that_were_asked_for_are_given_or_refused() -> None:
    assert choose_num_blocks(BUDGET, SHAPE, config(num_blocks=700), measured=True) == 700
    message = shortage(BUDGET, num_blocks=30_000)
    assert "7.09 GiB are missing on cuda:0: --num-blocks 30000 takes 58.59 GiB, 51.50 are left" in message
    assert "--num-blocks 26368, or none given" in message
    with pytest.raises(ConfigError, match="1600, less than one sequence of 8192: raise --num-blocks to 512"):
        check_num_blocks(100, SHAPE)
    check_num_blocks(None, SHAPE)
    check_num_blocks(512, SHAPE)


def test_a_shortage_says_how_much_is_missing_and_what_each_flag_is_worth() -> None:
    budget = msgspec.structs.replace(BUDGET, total=24 * GIB, free=4 * GIB + GIB // 2, share=21 * GIB)
    message = shortage(budget)
    assert "0.50 GiB are missing on cuda:0: the KV of one sequence of 8192 tokens takes 1.00 GiB, 0.50 are" in message
    assert "Of 24.00 GiB: weights 15.00, largest step 4.00, CUDA graphs 1.00, libraries 0.50." in message
    assert "--gpu-memory-utilization 0.90 (now 0.9)" in message
    assert "--max-model-len 4096 (now 8192)" in message
    assert "--max-num-batched-tokens 6826 (now 8192)" in message
    assert "--max-num-seqs 128 (now 256)" in message


@pytest.mark.parametrize(
    ("flag", "settings", "shape"),
    [
        ("--gpu-memory-utilization", {"gpu_memory_utilization": 0.90}, SHAPE),
        ("--max-model-len", {}, KvShape(2 << 20, 16, 4096)),
        ("--max-num-batched-tokens", {"max_num_batched_tokens": 6826}, SHAPE),
        ("--max-num-seqs", {"max_num_seqs": 128}, SHAPE),
    ],
)
def test_each_value_that_is_suggested_suffices(flag: str, settings: dict[str, Any], shape: KvShape) -> None:
    total = 24 * GIB
    changed = config(**{"gpu_memory_utilization": 0.875, **settings})
    budget = msgspec.structs.replace(
        BUDGET,
        total=total,
        free=4 * GIB + GIB // 2,
        share=int(total * changed.gpu_memory_utilization),
        forward=3 * GIB * changed.max_num_batched_tokens // 8192,
        sampling=GIB * changed.max_num_seqs // 256,
    )
    assert choose_num_blocks(budget, shape, changed, measured=True) >= shape.least, flag


def test_flags_that_do_not_suffice_say_what_they_save() -> None:
    budget = msgspec.structs.replace(BUDGET, total=24 * GIB, free=2 * GIB, share=22 * GIB)
    message = shortage(budget, KvShape(2 << 20, 16, 81_920))
    assert "a lower --max-num-batched-tokens (now 8192): 1024 fewer save 0.38 GiB" in message
    assert "a lower --max-num-seqs (now 256): 16 fewer save 0.06 GiB" in message
    assert "the end of the other processes, which hold 2.50 GiB" in message
    assert "--gpu-memory-utilization" not in message


def test_with_nothing_left_only_more_memory_helps() -> None:
    budget = Budget(device="cpu", total=GIB, free=0, share=GIB, weights=GIB)
    assert shortage(budget).endswith("What helps: a device with more memory")


class PeakBytes(TorchDispatchMode):
    """Measures the peak memory of the tensors that are created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                size = tensor.untyped_storage().nbytes()
                self._now += size
                self.most = max(self.most, self._now)
                weakref.finalize(tensor, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self._now -= size


class FakeMemory:
    """A device on which other processes and steps hold given amounts of memory."""

    name = "cuda:0"
    measured = True

    def __init__(self, total: int = 80 * GIB, others: int = 2 * GIB) -> None:
        self.weights = 15 * GIB
        self.garbage = GIB
        self.steps = 0
        self._total, self._others = total, others

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self.held() - LIBRARIES_BYTES

    def held(self) -> int:
        return self.weights + self.garbage + self.steps

    def trim(self) -> None:
        self.garbage = 0

    def step(self, size: int) -> Callable[[], None]:
        def run() -> None:
            self.steps = max(self.steps, size)

        return run


def test_measuring_tells_weights_and_both_kinds_of_step_apart() -> None:
    memory = FakeMemory()
    budget = measure(memory, 72 * GIB, GIB, memory.step(3 * GIB), memory.step(5 * GIB))
    assert (budget.weights, budget.forward, budget.sampling) == (15 * GIB, 3 * GIB, 2 * GIB)
    assert (budget.others, budget.free) == (2 * GIB, memory.free())
    assert budget.for_kv == (72 - 15 - 3 - 2 - 1) * GIB - LIBRARIES_BYTES
    assert measure(memory, 72 * GIB, GIB, memory.step(3 * GIB), memory.step(2 * GIB)).sampling == 0


@pytest.mark.parametrize("part", [0.0, 0.03, 0.06, 0.5])
@pytest.mark.parametrize("sends", [True, False])
def test_gpu_pairs_and_all_else_are_no_more_than_the_device(part: float, sends: bool) -> None:
    memory = FakeMemory()
    pairs = plan(memory.total(), part, sends)
    steps = memory.step(3 * GIB), memory.step(5 * GIB)
    share = int(0.92 * memory.total())
    budget = measure(memory, share, GIB, *steps, pairs=pairs.set_aside)
    kv = choose_num_blocks(budget, SHAPE, config(max_num_seqs=4096), measured=True) * SHAPE.block_bytes
    # The cache uses all memory that is left, but not one block more.
    assert share - SHAPE.block_bytes < sum(budget.rows().values()) - budget.others + kv <= share
    assert budget.others == 2 * GIB
    assert pairs.set_aside <= part * memory.total()
    assert ("GPU pairs" in budget.rows()) == bool(pairs.most)


def test_how_many_gpu_pairs_fit() -> None:
    assert plan(139 * GIB, 0.06, sends=False).most == 10
    assert plan(80 * GIB, 0.06, sends=False).most == 6
    assert plan(80 * GIB, 0.06, sends=True).most == 32
    assert plan(16 * GIB, 0.06, sends=False) == plan(80 * GIB, 0.0, sends=True) == PairMemory(0, 0)
    for sends in (True, False):
        one, two = (plan(80 * GIB, part, sends) for part in (0.02, 0.0215 if sends else 0.03))
        assert (two.set_aside - one.set_aside) % (two.most - one.most) == 0


def test_too_little_memory_beside_gpu_pairs_names_their_setting() -> None:
    budget = msgspec.structs.replace(BUDGET, free=30 * GIB, share=26 * GIB, pairs=6 * GIB)
    assert "a lower --gpu-pair-memory: GPU pairs hold 6.00 GiB" in shortage(budget, num_blocks=4096)


def test_an_engine_leaves_what_is_set_aside(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(total=17 * GIB + LIBRARIES_BYTES, others=0)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "gpu_memory_utilization": 1.0}
    make_measured(llama, monkeypatch, memory, **settings)
    with pytest.raises(ConfigError, match=r"GPU pairs 2\.00"):
        make_measured(llama, monkeypatch, memory, set_aside_bytes=2 * GIB, **settings)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    memory = FakeMemory(total=24 * GIB, others=4 * GIB)
    memory.weights = memory.garbage = 0
    check_weights(15 * GIB, memory, 22 * GIB, "bfloat16")
    with pytest.raises(ConfigError, match=r"take 21.00 GiB in bfloat16, .* 24.00 .* 19.50 are free: 1.50 GiB are miss"):
        check_weights(21 * GIB, memory, 22 * GIB, "bfloat16")
    with pytest.raises(ConfigError, match=r"this process may take 12.00: raise --gpu-memory-utilization"):
        check_weights(15 * GIB, memory, 12 * GIB, "bfloat16")


@pytest.mark.parametrize(("tokens", "sequences", "context"), [(64, 8, 512), (7, 16, 40), (500, 4, 60), (1, 1, 1)])
def test_the_largest_steps_are_as_large_as_the_scheduler_makes_them(tokens: int, sequences: int, context: int) -> None:
    settings = config(max_num_batched_tokens=tokens, max_num_seqs=sequences, block_size=16)
    prompts, chunk, short = forward_steps(settings, [context])
    assert prompts.num_tokens == min(tokens, sequences * context)
    assert (chunk.counts, chunk.ends) == ([min(tokens, context)], [context])
    assert (short.counts, short.ends) == ([min(tokens, context, 96)], [context])
    many = sampling_steps(settings, context)
    assert {len(step.rows) for step in many} == {min(tokens, sequences)}
    assert max(step.num_tokens for step in many) == min(tokens, sequences * context)
    for step in (prompts, chunk, short, *many):
        assert step.num_tokens <= tokens
        assert len(step.rows) <= sequences
        assert all(1 <= count <= end <= context for count, end in zip(step.counts, step.ends, strict=True))
        assert [new.blocks.shape[1] for new in step.new_rows] == [-(-end // 16) for end in step.ends]
        assert all(step.draws)


def make_measured(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: FakeMemory, **settings: Any) -> Engine:
    monkeypatch.setattr("baton_engine.runner.memory_of", lambda device: memory)
    return Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", num_threads=1, **settings))


def test_an_engine_runs_the_largest_steps_and_is_none_the_worse(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.host_draws.FLOAT_ROWS", 3)
    engine = make_measured(llama, monkeypatch, FakeMemory(), max_num_batched_tokens=64, max_num_seqs=8)
    assert engine.pool.num_blocks == 512 // 16 * 8
    assert not any(plane.count_nonzero() for plane in engine.runner.cache.planes)
    request = make_request(1, make_prompt(40), n=5, logprobs=2)
    plain = Engine(EngineConfig(model=str(llama), device="cpu", dtype="float32", num_threads=1))
    told, told_by_plain = (
        [msgspec.structs.replace(delta, queued_s=0.0, prefill_s=0.0) for delta in generate(each, [wanted]).deltas]
        for each, wanted in ((engine, request), (plain, msgspec.structs.replace(request)))
    )
    assert told == told_by_plain
    assert_idle(engine)


def test_start_up_measures_the_sampler_that_serves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draw in service has a higher peak of memory than the draws that start-up measured."""
    pretend(monkeypatch)
    most = {"start": 0, "service": 0}
    draws: dict[str, list[tuple[DeviceSampler, list[RowDraw]]]] = {"start": [], "service": []}
    draw = DeviceSampler.draw

    def watched(
        self: DeviceSampler, logits: torch.Tensor, inputs: torch.Tensor, tokens: torch.Tensor, wanted: list[RowDraw],
        *masks: torch.Tensor,
    ) -> Drawn:  # fmt: skip
        draws[phase].append((self, wanted))
        with PeakBytes() as peak:
            drawn = draw(self, logits, inputs, tokens, wanted, *masks)
        most[phase] = max(most[phase], peak.most)
        return drawn

    monkeypatch.setattr(DeviceSampler, "draw", watched)
    phase = "start"
    engine = make_measured(llama, monkeypatch, FakeMemory(), max_num_batched_tokens=64, max_num_seqs=8)
    assert all(row is None for row in engine.runner._table.rows)  # type: ignore[attr-defined]
    phase = "service"
    everything: dict[str, Any] = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": 20}
    edits: dict[str, Any] = {"presence_penalty": 0.1, "repetition_penalty": 1.1, "bad_words": [[3, 4]]}
    for kinds in ([everything | edits] * 8, [everything | edits] + [everything] * 7, [everything] * 4 + [edits] * 4):
        generate(engine, [make_request(id, make_prompt(440, seed=id), 12, **kind) for id, kind in enumerate(kinds)])
    assert {id(sampler) for phase in draws.values() for sampler, _ in phase} == {id(draws["start"][0][0])}
    assert max(len(wanted) for _, wanted in draws["service"]) == 8
    assert 0 < most["service"] <= most["start"]


def test_memory_that_runs_out_is_a_matter_of_settings(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("baton_engine.runner.Runner.launch", launch)
    with pytest.raises(ConfigError, match=r"a step of 64 tokens .* lower --max-num-batched-tokens or --max-num-seqs"):
        make_measured(llama, monkeypatch, FakeMemory(), max_num_batched_tokens=64)


def test_a_cache_that_another_process_has_the_memory_of(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = KvCache.allocate

    def fail(self: KvCache, num_blocks: int) -> None:
        if num_blocks:
            raise torch.OutOfMemoryError
        allocate(self, num_blocks)

    monkeypatch.setattr(KvCache, "allocate", fail)
    with pytest.raises(ConfigError, match=r"the KV cache of .* found too little memory on cpu"):
        Engine(EngineConfig(model=str(llama), device="cpu", dtype="float32", num_threads=1))


def test_too_little_memory_for_one_sequence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(total=16 * GIB + GIB // 16 + LIBRARIES_BYTES, others=0)
    with pytest.raises(ConfigError, match=r"GiB are missing on cuda:0: the KV of one sequence of 512 tokens"):
        make_measured(llama, monkeypatch, memory, max_num_batched_tokens=64)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.01])
def test_the_share_is_a_part(llama: Path, value: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization must be above 0 and at most 1"):
        Engine(EngineConfig(model=str(llama), gpu_memory_utilization=value))
