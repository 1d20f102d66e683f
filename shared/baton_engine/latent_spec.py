"""Multi-head latent attention: the sizes of its parts, and in which of two ways a chunk is cheaper to compute."""

from .attention_spec import AttentionSpec


class LatentSpec(AttentionSpec, frozen=True, kw_only=True):
    """Attention whose cache holds one latent vector of each token for all heads (DeepSeek-AI, "DeepSeek-V2", 2024).

    rank: elements of a latent of which each head's key and value are linear functions. rope_dim: the rotated elements
    after them, which end each head's key. key_dim: elements of a head's key before those. value_dim: of its value. The
    layer gives the backend the weights that turn a latent into keys and values, [heads, key_dim + value_dim, rank].
    """

    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int

    @property
    def latent_dim(self) -> int:
        """Elements that the cache holds of a token in a layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.key_dim + self.rope_dim

    def pair_operations(self, decode: bool) -> int:
        """Return the additions and multiplications of a head for each pair of a query and a key. decode: absorbed."""
        return 2 * (self.latent_dim + self.rank if decode else self.query_dim + self.value_dim)

    def expands(self, tokens: int, length: int) -> bool:
        """Whether expanding all latents of a sequence is cheaper than absorbing the weights into the queries.

        tokens: to compute, the last ones of `length`. Counted are the multiplications of a head. Both ways multiply
        rank * (key_dim + value_dim) times for each new token: to expand its latent, or to absorb the weights into its
        query and to turn its result into a value. Expanding does it for the tokens before the new ones, too. In return
        a pair of query and key needs key_dim + rope_dim + value_dim multiplications, and not 2 * rank + rope_dim. Only
        pairs within the window are computed.
        """
        before = length - tokens
        pairs = tokens * before + tokens * (tokens + 1) // 2
        if self.window is not None:
            pairs -= _sum_to(length - self.window) - _sum_to(before - self.window)
            before = min(before, self.window - 1)
        saved = pairs * (2 * self.rank - self.key_dim - self.value_dim)
        return before * self.rank * (self.key_dim + self.value_dim) <= saved


class IndexedLatentSpec(LatentSpec, frozen=True, kw_only=True):
    """Latent attention over only the tokens that an indexer selects (DeepSeek-AI, "DeepSeek-V3.2", 2025).

    selected: the most tokens that a query attends to. index_heads: heads of the indexer's queries. index_dim: elements
    of such a head, and of the index key of a token in the cache. group: so many consecutive tokens are selected
    together, by a key of their group (baton_kernels.reference.index_pools). A query also attends to the tokens after
    the last group that has ended, which `selected` does not count. 1 = each token is selected for itself.
    """

    selected: int
    index_heads: int
    index_dim: int
    group: int = 1

    @property
    def index_row(self) -> int:
        """Elements of the indexer that the cache holds of a token."""
        return self.index_dim if self.group == 1 else 2 * self.index_dim

    def attended(self, tokens: int) -> int:
        """Return how many tokens a query attends to that sees so many."""
        ended = tokens // self.group * self.group
        return min(ended, self.selected) + tokens - ended


def latent_specs(specs: tuple[AttentionSpec, ...]) -> tuple[LatentSpec, ...]:
    """Return the kinds of latent attention that layers have. Those with a spec of another kind have states instead."""
    return tuple({spec: None for spec in specs if isinstance(spec, LatentSpec)})


def shared_spec(specs: tuple[AttentionSpec, ...]) -> LatentSpec:
    """Return the spec of all layers with latent attention."""
    [spec] = latent_specs(specs)
    return spec


def _sum_to(last: int) -> int:
    """Return the sum of the numbers from 1 to `last`."""
    return last * (last + 1) // 2 if last > 0 else 0
