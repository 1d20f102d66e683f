"""Chooses the ends of pairs with other pods' GPUs."""

from .executor import Executor
from .kv_cache import KvCache
from .pairs.ends import NoOtherRanks, PairEnds
from .pairs.rank_end import RankEnd
from .ranks.executor import RanksExecutor


def make_pair_ends(runner: Executor) -> PairEnds:
    """Return the ends of pairs for an executor. To be called once."""
    if isinstance(runner, RanksExecutor):
        return runner.pair_ends()
    cache = runner.cache
    assert isinstance(cache, KvCache)
    return PairEnds(RankEnd(cache, cache.layout, 0, 1), cache.layout, NoOtherRanks())
