"""The runner for a GPU: work goes as CUDA graphs where they pay, and each step is launched before the last one's tokens
are read."""

import logging
import time
from collections import deque

import msgspec
import torch

from .attention.backend import AttentionBackend
from .attention.triton_paged import TritonPaged
from .config import EngineConfig
from .context import Tokens
from .cuda_graph import Recorder
from .decode_graphs import DecodeGraphs
from .device_sampler import DeviceSampler, Drawn, RowDraw, is_special
from .largest_steps import forward_steps
from .loading import Progress
from .memory import GRAPHS_BYTES
from .model_config import ModelConfig
from .ops import Ops
from .runner import Choice, Fence, Launched, Runner, has_chunks, mark_broken, row_sums
from .sequence import Step
from .token_graphs import TokenGraphs
from .transfer import host_buffer, to_device, to_host
from .triton_ops import DETERMINISTIC, TRITON

log = logging.getLogger(__name__)

# Of an exported prompt's KV, what a group of layers holds at least: a piece from GPU to GPU, which smaller slows down.
_GROUP_BYTES = 64 << 20
_MOST_GROUPS = 8


class _Flying(msgspec.Struct):
    """Sampled tokens on their way to the host."""

    tokens: torch.Tensor  # pinned
    logprobs: torch.Tensor | None  # pinned
    drawn: Drawn | None
    where: list[int]  # which of the tokens the sampler has drawn
    counts: list[int]  # new choices of each sequence of the step
    arrived: torch.cuda.Event
    layers: "LayerMarks | None" = None
    starts: list[int] | None = None  # of the step's chunks, where there are some
    sums: torch.Tensor | None = None  # pinned: row_sums of the step

    def layers_done(self) -> int:
        return self.layers.done() if self.layers else 0

    def done(self) -> bool:
        done: bool = self.arrived.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> list[list[Choice]]:
        self.arrived.synchronize()
        tokens = self.tokens.tolist()
        choices = [Choice(token, None) for token in tokens]
        if self.drawn is not None and self.logprobs is not None:
            special = self.drawn.choices([tokens[index] for index in self.where], self.logprobs.tolist())
            for index, choice in zip(self.where, special, strict=True):
                choices[index] = choice
        rest = iter(choices)
        results = [[next(rest) for _ in range(count)] for count in self.counts]
        if self.starts is not None and self.sums is not None:
            mark_broken(results, self.starts, self.sums.tolist())
        return results


class LayerMarks:
    """Events between the layers of a step, after each of some groups of layers but the last."""

    def __init__(self, num_layers: int, groups: int) -> None:
        self._ends = {num_layers * group // groups for group in range(1, groups)}
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._done = 0

    def written(self, layer: int) -> None:
        """The KV of a layer has been launched."""
        if layer + 1 in self._ends:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((layer + 1, event))

    def done(self) -> int:
        """Return how many layers are complete, as far as there are marks."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            self._done = self._events.popleft()[0]
        return self._done


class CudaRunner(Runner):
    """No step waits for another, unless a sequence needs the host to see its logits."""

    depth = 1

    def __init__(self, config: EngineConfig, model: ModelConfig, progress: Progress | None = None) -> None:
        super().__init__(config, model, progress)
        self._progress = progress
        # One row more than there are sequences: padding and choices that are still to fork write to that.
        self._spare_row = config.max_num_seqs
        self._last_tokens = torch.zeros(self._spare_row + 1, dtype=torch.int64, device=self.device)
        self._sampler = DeviceSampler(config.max_num_seqs, self.max_model_len, model.vocab_size, self.device)
        self._sampler.warm_up(self.dtype)
        self._decode_graphs: DecodeGraphs | None = None
        self._token_graphs: TokenGraphs | None = None
        # A graph of decodes cuts long sequences by how many there are, which is what --deterministic rules out.
        if isinstance(self._backend, TritonPaged) and not config.enforce_eager and not config.deterministic:
            self._decode_graphs = DecodeGraphs(
                self._model,
                self.cache,
                self._backend,
                self._last_tokens,
                self._block_size,
                self.max_model_len,
                model.vocab_size,
            )

    def start(self) -> None:
        super().start()
        [prompts, _] = forward_steps(self._config, self.max_model_len)
        started = time.perf_counter()
        self.launch(prompts).wait()
        seconds = time.perf_counter() - started
        self.prefill_rate = prompts.num_tokens / seconds
        # The sequences that start-up made are as long as any and would keep their tokens on the host.
        self._sampler.forget()
        log.info(
            "prefill: %.0f tokens/s", self.prefill_rate, extra={"event": "prefill_rate", "rate": self.prefill_rate}
        )

    @property
    def _ops(self) -> Ops:
        return DETERMINISTIC if self._config.deterministic else TRITON

    def _make_backend(self, name: str) -> AttentionBackend:
        if name != "triton":
            return super()._make_backend(name)
        model, rows, deterministic = self.model, self._config.max_num_seqs, self._config.deterministic
        return TritonPaged(self.cache, model.num_heads, model.attention, rows, deterministic)

    @property
    def _graphs_bytes(self) -> int:
        return 0 if self._config.enforce_eager else GRAPHS_BYTES

    @torch.inference_mode()
    def _record_graphs(self) -> None:
        if self._config.enforce_eager:
            return
        recorder, config = Recorder(), self._config
        if self._decode_graphs:
            self._decode_graphs.capture(recorder, self._progress)
        self._token_graphs = TokenGraphs(
            self._model, self.cache, self._backend, self._resolve, recorder, self._block_size,
            min(config.max_num_batched_tokens, self.max_model_len),
            (self.model.num_heads, self.model.head_dim), self._progress,
        )  # fmt: skip

    def _resolve(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids with the last sampled token of row r in place of each -1 - r.

        A row whose last logits were not finite has no token, and its sequence has ended: it gets token 0.
        """
        known = self._last_tokens[(-1 - token_ids).clamp_(min=0)].clamp_(min=0)
        return torch.where(token_ids < 0, known, token_ids)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        needs_host = any(sequence.needs_host for sequence in step.sequences)
        if self._decode_graphs:
            if not needs_host and self._decode_graphs.fits(step):
                self.cache.copy(step.copies)
                return self._replay(self._decode_graphs, step)
            self._decode_graphs.forget_new_blocks(step)
        if needs_host:
            return super().launch(step)
        self.cache.copy(step.copies)
        return self._run(step)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _replay(self, graphs: DecodeGraphs, step: Step) -> Launched:
        done = graphs.replay(step)
        counts = [1] * len(step.sequences)
        special = [index for index, sequence in enumerate(step.sequences) if is_special(sequence.sampling)]
        if not special:
            return _fly(done.tokens, counts)
        draws = [RowDraw(step.sequences[i], step.ends[i], step.sequences[i].choice, i) for i in special]
        drawn = self._sampler.draw(done.logits, done.inputs, draws)
        done.tokens.index_copy_(0, to_device(special, self.device), drawn.tokens)
        rows = [draw.sequence.row for draw in draws]
        self._last_tokens.index_copy_(0, to_device(rows, self.device), drawn.tokens)
        return _fly(done.tokens, counts, drawn, special)

    def _run(self, step: Step) -> Launched:
        """Compute a step of any kind."""
        count = step.num_tokens
        size = self._token_graphs.size_for(count) if self._token_graphs else None
        host = host_buffer((3, size or count), torch.int64, self.device)
        packed = host.numpy()
        packed[:2, count:] = 0
        packed[2, count:] = -1
        batch = self._pack(step, packed)
        self._backend.prepare(batch)
        marks = self._marks(step)
        written = marks.written if marks else None
        if self._token_graphs and size:
            hidden, ids = self._token_graphs.forward(size, host, written)
        else:
            ids, positions, slots = host.to(self.device, non_blocking=True)
            if packed[0].min() < 0:
                ids = self._resolve(ids)
            hidden = self._model(self._context(Tokens(ids, positions, slots), written))
        sums = to_host(row_sums(hidden[:count])) if has_chunks(step) else None
        draws: list[RowDraw] = []
        rows: list[int] = []
        last: list[int] = []
        counts = [0] * len(step.sequences)
        for index, (sequence, _, end) in enumerate(step):
            if not step.samples[index]:
                continue
            choices = sequence.choices
            forks = len(choices) > 1
            counts[index] = len(choices)
            draws += [RowDraw(sequence, end, choice, len(last)) for choice in choices]
            rows += [self._spare_row if forks else sequence.row] * len(choices)
            last.append(batch.starts[index + 1] - 1)
        if not draws:
            return _fly(self._last_tokens[:0], counts, None, [], marks, batch.starts, sums)
        which = to_device(last, self.device)
        drawn = self._sampler.draw(self._model.logits(hidden[which]), ids[which], draws)
        self._last_tokens.index_copy_(0, to_device(rows, self.device), drawn.tokens)
        return _fly(drawn.tokens, counts, drawn, list(range(len(draws))), marks, batch.starts, sums)

    def _marks(self, step: Step) -> LayerMarks | None:
        """Return marks for a step in which a prompt is so long that its KV is worth handing over before it ends."""
        longest = max((count for sequence, count, _ in step if sequence.exports), default=0)
        groups = min(longest * self.cache.layout.token_bytes // _GROUP_BYTES, _MOST_GROUPS, self.model.num_layers)
        return LayerMarks(self.model.num_layers, groups) if groups > 1 else None


def _fly(
    tokens: torch.Tensor,
    counts: list[int],
    drawn: Drawn | None = None,
    where: list[int] | None = None,
    layers: LayerMarks | None = None,
    starts: list[int] | None = None,
    sums: torch.Tensor | None = None,
) -> _Flying:
    logprobs = to_host(drawn.logprobs) if drawn is not None and drawn.logprobs is not None else None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    flying = _Flying(to_host(tokens), logprobs, drawn, where or [], counts, arrived, layers, starts, sums)
    flying.arrived.record()
    return flying
