"""The table in which a runner keeps one row for each running sequence from step to step."""

from collections.abc import Iterable

import numpy as np
import torch

from baton_kernels.reference.decode_inputs import FIELDS, LAST_TOKEN

from .sampling import SamplingParams
from .step_plan import NewRow, StepPlan
from .transfer import to_device


class RowTable:
    """Rows [0, spare) hold the sequences that the plans have assigned. Row `spare` belongs to no sequence.

    rows: the NewRow with which each row began. blocks: [rows, groups of layers, most blocks] int32 on the host, the
    block tables. Entries beyond a row's own blocks are left over from earlier sequences.
    """

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int = 1) -> None:
        self.spare = max_rows
        self.max_len = max_len
        self.rows: list[NewRow | None] = [None] * (max_rows + 1)
        # Each table is aligned to 16 bytes: Triton compiles another kernel for pointers of another alignment.
        most_blocks = -(-max_len // (4 * block_size)) * 4
        self.blocks = np.zeros((max_rows + 1, num_groups, most_blocks), dtype=np.int32)

    def __getitem__(self, row: int) -> NewRow:
        """Return the NewRow with which a row began. Raises KeyError when no sequence has had the row."""
        found = self.rows[row]
        if found is None:
            raise KeyError(row)
        return found

    def extend(self, drawn: list[tuple[int, int]]) -> None:
        """Append to each of these rows the token that another stage has drawn for it."""
        for row, token in drawn:
            self[row].output.append(token)

    def forget(self) -> None:
        """Forget all rows. They belong to no sequence until a plan assigns them."""
        self.rows = [None] * len(self.rows)

    def take(self, plan: StepPlan) -> None:
        """Apply a plan's changes to the rows. This precedes the computation of the plan's chunks."""
        for new in plan.new_rows:
            self.rows[new.row] = new
            self.blocks[new.row, :, : new.blocks.shape[1]] = new.blocks
        for row, group, index, block in plan.new_blocks:
            self.blocks[row, group, index] = block


class DeviceRowTable(RowTable):
    """A RowTable with all that a GPU needs to draw a row's next token. CUDA graphs keep the addresses of its tensors,
    so the tensors are never replaced.

    tables: [rows, groups of layers, most blocks] int32, as `blocks`. columns: [FIELDS, rows] int64, as
    baton_kernels.reference.decode_inputs has them; the runner puts each token that it samples into the first.
    history: [rows, max_len] int32, for rows that `needs_history` the tokens known when the row began; each draw adds
    its input token. special: the rows whose draws need more than logits and columns. gathered: the rows whose draws
    need the logits of all ranks: special ones, and those with top_k, top_p or min_p.
    """

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device) -> None:
        super().__init__(max_rows, max_len, block_size, num_groups)
        rows = max_rows + 1
        self._device = device
        self.tables = torch.zeros(self.blocks.shape, dtype=torch.int32, device=device)
        self.columns = torch.zeros(FIELDS, rows, dtype=torch.int64, device=device)
        self.last_tokens = self.columns[LAST_TOKEN]
        self.history = torch.zeros(rows, max_len, dtype=torch.int32, device=device)
        self.special: set[int] = set()
        self.gathered: set[int] = set()

    def extend(self, drawn: list[tuple[int, int]]) -> None:
        super().extend(drawn)
        if drawn:
            packed = to_device(np.array(drawn, dtype=np.int64).T.copy(), self._device)
            self.last_tokens.index_copy_(0, packed[0], packed[1])

    def forget(self) -> None:
        super().forget()
        self.special.clear()
        self.gathered.clear()

    def take(self, plan: StepPlan) -> None:
        super().take(plan)
        if plan.new_rows:
            self._begin(plan.new_rows)

    def upload_blocks(self, plan: StepPlan) -> None:
        """Write a plan's new blocks into `tables`. Decode graphs do this themselves: when this copy ran between two
        replays, the kernels of later replays no longer overlapped."""
        if plan.new_blocks:
            _, groups, width = self.blocks.shape
            places = [(row * groups + group) * width + index for row, group, index, _ in plan.new_blocks]
            packed = to_device(np.array([places, [block for *_, block in plan.new_blocks]]), self._device)
            self.tables.view(-1).index_copy_(0, packed[0], packed[1].int())

    def resolve(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids, with each -1 - r replaced by the last sampled token of row r.

        A row whose last logits were not finite has no token, and its sequence has ended, so token 0 stands for it.
        """
        known = self.last_tokens[(-1 - token_ids).clamp_(min=0)].clamp_(min=0)
        return torch.where(token_ids < 0, known, token_ids)

    def _begin(self, new_rows: list[NewRow]) -> None:
        rows = [new.row for new in new_rows]
        packed = np.array([rows, *zip(*map(_columns, new_rows), strict=True)], dtype=np.int64)
        on_device = to_device(packed, self._device)
        self.columns.index_copy_(1, on_device[0], on_device[1:])
        width = max(new.blocks.shape[1] for new in new_rows)
        tables = to_device(self.blocks[rows, :, :width], self._device, torch.int32)
        self.tables[:, :, :width].index_copy_(0, on_device[0], tables)
        by_prompt: dict[int, list[NewRow]] = {}
        for new in new_rows:
            self.special.discard(new.row)
            self.gathered.discard(new.row)
            if is_special(new.sampling):
                self.special.add(new.row)
            if is_special(new.sampling) or new.sampling.filters:
                self.gathered.add(new.row)
            if needs_history(new.sampling):
                by_prompt.setdefault(id(new.prompt), []).append(new)
        for same in by_prompt.values():
            self._upload_history(same)

    def _upload_history(self, new_rows: list[NewRow]) -> None:
        """Write the known tokens of rows with the same prompt into the history. The prompt is uploaded once."""
        prompt = to_device(new_rows[0].prompt, self._device, torch.int32)
        for new in new_rows:
            line = self.history[new.row]
            line[: len(prompt)].copy_(prompt)
            if new.output:
                line[len(prompt) : len(prompt) + len(new.output)].copy_(
                    to_device(new.output, self._device, torch.int32)
                )


def is_special(params: SamplingParams) -> bool:
    """Whether a draw needs more than logits and columns: it reads tokens or a mask, or reports logprobs."""
    return params.edits_logits or params.logprobs is not None


def needs_history(params: SamplingParams) -> bool:
    """Whether a draw depends on the tokens before it."""
    return params.has_penalties or any(len(word) > 1 for word in params.bad_words)


def _columns(new: NewRow) -> Iterable[int]:
    """Return the columns of a row, in their order."""
    params = new.sampling
    bits = np.array([params.draw_temperature, params.top_p, params.min_p], dtype=np.float32).view(np.int32)
    last = new.output[-1] if new.output else new.prompt[-1]
    return [last, new.choice, params.seed_bits, min(params.top_k, 1 << 62), *map(int, bits)]
