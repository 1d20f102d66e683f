"""Which rank of one pod sends which KV heads to which rank of another pod."""

from functools import cache

import msgspec

from .extent import Extent

# The length of the id by which NCCL connects two GPUs.
UNIQUE_ID_BYTES = 128
# The most ranks that a pod may claim to have.
MOST_RANKS = 64


class RankPart(msgspec.Struct, frozen=True):
    """Consecutive KV heads of the model that one rank of the sending pod sends to one rank of the receiving pod."""

    sender: int
    receiver: int
    first_head: int
    num_heads: int

    def within(self, extent: Extent) -> Extent | None:
        """Return the part of an extent that has these heads; None when it has none of them."""
        first = max(extent.heads.start, self.first_head)
        end = min(extent.heads.stop, self.first_head + self.num_heads)
        return msgspec.structs.replace(extent, first_head=first, num_heads=end - first) if first < end else None


def split_ids(unique_ids: bytes) -> list[bytes]:
    """Split a series of NCCL ids into single ids."""
    return [unique_ids[at : at + UNIQUE_ID_BYTES] for at in range(0, len(unique_ids), UNIQUE_ID_BYTES)]


def divides(heads: int, ranks: int) -> bool:
    """Whether a pod can divide this many KV heads among this many ranks."""
    return 0 < ranks <= MOST_RANKS and (heads % ranks == 0 or ranks % heads == 0)


def rank_heads(heads: int, rank: int, ranks: int) -> range:
    """Return the heads that a rank has. Where there are fewer heads than ranks, several ranks have the same head."""
    first = rank * heads // ranks
    return range(first, first + max(heads // ranks, 1))


@cache
def rank_parts(heads: int, senders: int, receivers: int) -> tuple[RankPart, ...]:
    """Return the parts in which a pod of `senders` ranks sends KV to a pod of `receivers` ranks, ordered by receiver.

    Each rank that receives gets all heads that it has. Where several ranks could send the same head, the receivers are
    divided among them.
    """
    sending = [rank_heads(heads, rank, senders) for rank in range(senders)]
    receiving = [rank_heads(heads, rank, receivers) for rank in range(receivers)]
    parts: list[RankPart] = []
    for receiver, wanted in enumerate(receiving):
        for head in wanted:
            holders = [rank for rank, held in enumerate(sending) if head in held]
            takers = [rank for rank, taken in enumerate(receiving) if head in taken]
            sender = holders[takers.index(receiver) * len(holders) // len(takers)]
            last = parts[-1] if parts else None
            if last is not None and (last.sender, last.receiver) == (sender, receiver):
                parts[-1] = msgspec.structs.replace(last, num_heads=last.num_heads + 1)
            else:
                parts.append(RankPart(sender, receiver, head, 1))
    return tuple(parts)


def most_links(heads: int, senders: int, receivers: int) -> tuple[int, int]:
    """Return the most parts that any rank of the sending pod has, and the most that any rank of the other pod has."""
    parts = rank_parts(heads, senders, receivers)
    sending, receiving = [part.sender for part in parts], [part.receiver for part in parts]
    return max(map(sending.count, sending)), max(map(receiving.count, receiving))
