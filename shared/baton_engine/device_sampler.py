"""The sampler for a GPU. It does the same as sampler.py, in the same order and with the same noise, without the host.

A draw depends on tokens that the host may not have read yet: the row table keeps the tokens of each sequence on the
device, and each draw adds its input token. Everything else that a draw needs follows from the sampling parameters. It
is uploaded only when the drawn rows change, so that a run of decode steps uploads only positions and grammar masks.

A draw differs from sampler.py's only where rounding decides (kernels/baton_kernels/thresholds.py).
"""

import msgspec
import torch

from baton_kernels.logprobs import chosen_logprobs
from baton_kernels.masks import apply_masks
from baton_kernels.penalties import apply_penalties
from baton_kernels.sampling import FEW_ROWS, gumbel_argmax
from baton_kernels.thresholds import thresholds

from .draw_groups import (
    CHOICE,
    INDEX,
    MASK,
    MIN_P,
    PADDING,
    PROMPT_LEN,
    REPETITION,
    ROW,
    SEED,
    TABLE_ROW,
    TARGET,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DrawGroups,
    DrawPlan,
    Group,
    RowDraw,
    Words,
)
from .logprobs import logprob_columns, logprobs_of
from .results import Choice
from .row_table import DeviceRowTable
from .transfer import to_device

_OFF = float("-inf")


class Drawn(msgspec.Struct):
    """The results of some draws beside the tokens themselves.

    indices: the places of the tokens among those of the step. logprobs: [draws that want logprobs, 2 + 2 * n] float32,
    in the columns of `logprob_columns`; None when no draw wants them. counts: the number of alternatives that each draw
    wants; None = it wants no logprobs.
    """

    indices: list[int]
    logprobs: torch.Tensor | None
    counts: list[int | None]

    def choices(self, tokens: list[int], logprobs: list[list[float]]) -> list[Choice]:
        """Return the drawn choices, given all tokens of the step and the logprobs on the host."""
        rows = iter(logprobs)
        return [
            Choice(tokens[index], None if count is None else logprobs_of(tokens[index], next(rows), count))
            for index, count in zip(self.indices, self.counts, strict=True)
        ]


class DeviceSampler:
    """Draws tokens for the rows of a table. All work is queued on the device; the host waits for none of it."""

    def __init__(self, table: DeviceRowTable, vocab: int, device: torch.device) -> None:
        assert vocab < 1 << 24
        self._table, self._vocab, self._device = table, vocab, device
        self._groups = DrawGroups(table, vocab, device)
        # The last plan of draws without masks and of those with masks. A step may have both kinds.
        self._plans: dict[bool, DrawPlan] = {}

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for logits of this type, which takes seconds that no request should wait for."""
        for count in (1, FEW_ROWS + 1):
            ints = torch.zeros(count, dtype=torch.int64, device=self._device)
            ones = torch.ones(count, device=self._device)
            for kind in {dtype, torch.float32}:
                scores = torch.zeros(count, self._vocab, dtype=kind, device=self._device)
                least = thresholds(scores, ones, ints, ones, ones)
                gumbel_argmax(scores, ones, least, ints, ints, ints)
            apply_penalties(scores.float(), self._table.history, ints, ints, ints, ones, ones, ones)
            masks = torch.zeros(1, -(-self._vocab // 32), dtype=torch.int32, device=self._device)
            apply_masks(scores.float(), scores.to(dtype), ints, masks, ints)
            chosen_logprobs(scores.to(dtype), ints)

    def forget(self) -> None:
        """Forget all rows."""
        self._groups = DrawGroups(self._table, self._vocab, self._device)
        self._plans.clear()

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        inputs: torch.Tensor,
        tokens: torch.Tensor,
        draws: list[RowDraw],
        masks: torch.Tensor | None = None,
    ) -> Drawn:
        """Put the token of each draw into tokens [step's draws] int64, and into the table as its row's last token.

        A token is NOT_FINITE where gumbel_argmax returns that. logits: [B, vocab], contiguous, not changed. inputs: [B]
        int64, the input token of each row of logits. draws: at least one; several may share a row of logits. masks: [M,
        words] int32, as in apply_masks; either every draw has a mask or none has one.
        """
        plan = self._groups.plan(draws, masks is not None, self._plans.get(masks is not None))
        self._plans[masks is not None] = plan
        for group in plan.groups:
            ends = to_device([draws[index].end for index in group.indices], self._device)
            scores = _take(logits, group.rows, group.ints[ROW])
            if group.edits:
                scores = scores.to(torch.float32, copy=True)
                if group.history:
                    self._extend_history(group, inputs, ends)
                self._edit(scores, group, ends)
            if masks is not None:
                apply_masks(scores, logits, group.ints[ROW], masks, group.ints[MASK])
            drawn = _choose(scores, group, ends)
            tokens.index_copy_(0, group.ints[INDEX], drawn)
            self._table.last_tokens.index_copy_(0, group.ints[TARGET], drawn)
        return Drawn([draw.index for draw in draws], self._logprobs(logits, tokens, plan), plan.counts)

    def _extend_history(self, group: Group, inputs: torch.Tensor, ends: torch.Tensor) -> None:
        """Add the newest token of each of the group's rows to the history, which does no harm to rows without one."""
        newest = inputs.index_select(0, group.ints[ROW]).to(torch.int32)
        history = self._table.history.view(-1)
        history.index_copy_(0, group.ints[TABLE_ROW] * self._table.max_len + ends - 1, newest)

    def _edit(self, scores: torch.Tensor, group: Group, ends: torch.Tensor) -> None:
        """Do the same as sampler._edit_by_request to the scores of a group, [n, vocab] float32, in place."""
        flat = scores.view(-1)
        if group.allowed is not None and group.allowed_draws is not None:
            kept = flat.index_select(0, group.allowed)
            scores.index_fill_(0, group.allowed_draws, _OFF)
            flat.index_copy_(0, group.allowed, kept)
        if group.banned is not None:
            flat.index_fill_(0, group.banned, _OFF)
        if group.words is not None:
            # Several words may end with the same token. As each adds -inf or 0, the order of additions is irrelevant.
            flat.index_add_(0, group.words.ends, self._penalty_of_words(group, group.words, ends))
        if group.biased is not None and group.biases is not None:
            flat.index_add_(0, group.biased, group.biases)
        if group.penalties:
            apply_penalties(
                scores, self._table.history, group.ints[TABLE_ROW], group.ints[PROMPT_LEN], ends,
                *group.floats[REPETITION:],
            )  # fmt: skip

    def _penalty_of_words(self, group: Group, words: Words, ends: torch.Tensor) -> torch.Tensor:
        """Return [W] float32: -inf where the output ends with all tokens of the word but its last, else 0."""
        end, longest = ends.index_select(0, words.draws), words.beginnings.shape[1]
        first = group.ints[TABLE_ROW].index_select(0, words.draws) * self._table.max_len + end - longest
        places = first.unsqueeze(1) + torch.arange(longest, device=self._device)
        tail = self._table.history.view(-1).index_select(0, places.view(-1).clamp_(min=0)).view_as(places)
        equal = ((tail == words.beginnings) | (words.beginnings == PADDING)).all(dim=1)
        long_enough = end - group.ints[PROMPT_LEN].index_select(0, words.draws) >= words.lengths
        return torch.where(equal & long_enough, _OFF, 0.0)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, plan: DrawPlan) -> torch.Tensor | None:
        if not plan.wanted_rows:
            return None
        rows = _take(logits, plan.wanted_rows, plan.wanted_logits_rows)
        most = min(max(count or 0 for count in plan.counts), self._vocab)
        return logprob_columns(rows, tokens.index_select(0, plan.wanted).clamp_(min=0), most)


def _take(logits: torch.Tensor, rows: list[int], index: torch.Tensor) -> torch.Tensor:
    """Return rows of logits, without a copy when they are the first ones in order."""
    return logits[: len(rows)] if rows == list(range(len(rows))) else logits.index_select(0, index)


def _choose(scores: torch.Tensor, group: Group, ends: torch.Tensor) -> torch.Tensor:
    temperatures, seeds, choices = group.floats[TEMPERATURE], group.ints[SEED], group.ints[CHOICE]
    if group.filters:
        least = thresholds(scores, temperatures, group.ints[TOP_K], group.floats[TOP_P], group.floats[MIN_P])
    else:
        least = torch.full_like(temperatures, _OFF)
    return gumbel_argmax(scores, temperatures, least, seeds, ends, choices)
