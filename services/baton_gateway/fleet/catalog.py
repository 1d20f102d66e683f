"""The models of a gateway, and the pools of pods that serve them."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ..errors import model_not_allowed, no_decode_pod, overloaded, unknown_model
from ..models.model import ServedModel, load_model
from ..models.models_file import PoolSpec
from ..routing.canary import CanaryShare
from ..routing.pods import PodLimits
from ..routing.retry_budget import RetryBudget
from ..settings import GatewaySettings
from ..telemetry.retry_metrics import RetryMetrics
from ..telemetry.revision_metrics import RevisionMetrics
from ..telemetry.router_metrics import RouterMetrics
from ..tenancy.tenants import Identity
from .fleet import Fleet


@dataclass(frozen=True, eq=False)
class Pool:
    """Some pods of a model, and the requests that they are meant for."""

    spec: PoolSpec
    fleet: Fleet

    def limits(self) -> PodLimits:
        """Return the limits that fit all live pods, or the last known limits while the last pod is being replaced.

        Raises ApiError 503 when no pod is live and none is expected soon.
        """
        limits = self.fleet.limits() or self.fleet.expected_limits()
        if limits is None:
            raise no_decode_pod()
        return limits

    def is_for(self, identity: Identity | None) -> bool:
        return not self.spec.tenants or (identity is not None and identity.name in self.spec.tenants)

    @property
    def prompt_limit(self) -> float:
        """The longest prompt that the pool is meant for, in tokens."""
        return self.spec.max_prompt_tokens or float("inf")


@dataclass(frozen=True, eq=False)
class Model:
    """A model, and its pools in order of preference."""

    served: ServedModel
    pools: Sequence[Pool]

    @property
    def name(self) -> str:
        return self.served.name

    def pool(self, identity: Identity | None, prompt_tokens: int) -> Pool:
        """Return the first pool that is meant for such a request and has live pods.

        Without live pods in any of these pools, return the first of them that expects a pod soon, or else the first of
        them. A prompt that is longer than any pool is meant for goes to a pool for the longest prompts.
        """
        mine = [pool for pool in self.pools if pool.is_for(identity)]
        longest = max(pool.prompt_limit for pool in mine)
        fitting = [pool for pool in mine if pool.prompt_limit >= min(prompt_tokens, longest)]
        live = (pool for pool in fitting if pool.fleet.limits() is not None)
        expecting = (pool for pool in fitting if pool.fleet.expected_limits() is not None)
        return next(itertools.chain(live, expecting), fitting[0])

    def max_model_len(self, identity: Identity | None) -> int | None:
        """Return the longest context of the live pods that serve an identity, in tokens; None without such pods."""
        found = [pool.fleet.limits() for pool in self.pools if pool.is_for(identity)]
        return max((limits.max_model_len for limits in found if limits is not None), default=None)

    def open_to(self, identity: Identity | None) -> bool:
        """Whether this identity may use the model."""
        return (identity is None or identity.may_use(self.name)) and any(pool.is_for(identity) for pool in self.pools)


class Catalog:
    """All models, by name."""

    def __init__(
        self, models: Iterable[Model], revisions: RevisionMetrics, routing: RouterMetrics, retries: RetryMetrics
    ) -> None:
        self.refusing = False  # True once the gateway shuts down and takes no new requests
        self._models = {model.name: model for model in models}
        self._revisions = revisions
        self._routing = routing
        self._retries = retries

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def pools(self) -> Iterator[tuple[str, Pool]]:
        """All pools, each with the name of its model."""
        return ((model.name, pool) for model in self for pool in model.pools)

    @property
    def ready(self) -> bool:
        """Whether any model can be served."""
        return any(pool.fleet.ready for _, pool in self.pools)

    def find(self, name: str | None, identity: Identity | None) -> Model:
        """Return the model of that name; without a name, the first.

        Raises ApiError when there is no such model, or this identity may not use it.
        """
        model = next(iter(self)) if name is None else self._models.get(name)
        if model is None:
            raise unknown_model(str(name))
        if not model.open_to(identity):
            raise model_not_allowed(model.name)
        return model

    def pool(self, model: Model, identity: Identity | None, prompt_tokens: int) -> Pool:
        """Return the pool for a request, as `Model.pool` does. Raises ApiError 503 while the gateway shuts down."""
        if self.refusing:
            raise overloaded("The server is shutting down.")
        return model.pool(identity, prompt_tokens)

    def set_canaries(self, canaries: Mapping[str, CanaryShare]) -> None:
        """Replace all canaries. canaries: by model name; a model that is not in it has no canary from now on."""
        for name, pool in self.pools:
            pool.fleet.router.canary = canaries.get(name)

    def register(self, registry: CollectorRegistry) -> None:
        """Add the metrics of all models to a registry."""
        for metrics in (self._revisions, self._routing, self._retries):
            metrics.register(registry)

    def start(self) -> None:
        for _, pool in self.pools:
            pool.fleet.start()

    async def stop(self) -> None:
        for model in self:
            for pool in model.pools:
                await pool.fleet.stop()


def load_catalog(settings: GatewaySettings) -> Catalog:
    """Read all models. Raises ModelError, PeerTlsError, PeerTokenError."""
    revisions, routing, retries = RevisionMetrics(), RouterMetrics(), RetryMetrics()
    budget = RetryBudget(settings.retry_share, settings.retries_per_s, time.monotonic)
    models = [
        Model(
            load_model(spec),
            [
                Pool(pool, Fleet(settings, spec.name, revisions, routing, retries, budget, pool.decode, pool.prefill))
                for pool in spec.pools
            ],
        )
        for spec in settings.model_specs()
    ]
    return Catalog(models, revisions, routing, retries)
