"""The parts every endpoint works with, and the steps all generations share."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from baton_proto import serving_pb2 as pb

from .answers.choice import Choice
from .answers.reply import Reply, ReplyOptions
from .answers.shapes import Shape
from .bounds import MAX_SESSION_CHARS
from .concurrency.pace import Pace
from .concurrency.turns import Turns
from .errors import overloaded
from .fleet.canary_file import CanaryFile
from .fleet.catalog import Catalog, Model, Pool
from .generation.generation import Generation
from .generation.stream_limits import StreamLimits
from .requests.bodies import GenerationRequest
from .settings import GatewaySettings
from .telemetry.metrics import Metrics
from .telemetry.record import RequestRecord
from .tenancy.cache_salt import cache_salt
from .tenancy.limits.redis_store import RedisLimits, connect
from .tenancy.quota import Quota
from .tenancy.tenants import Tenants

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

    from .fleet.discovery import Discovery
    from .telemetry.genai_metrics import GenAiMetrics


class Gateway:
    """The models, the pods that serve them, and what is measured."""

    def __init__(
        self,
        settings: GatewaySettings,
        catalog: Catalog,
        tracing: "Tracing | None" = None,
        genai: "GenAiMetrics | None" = None,
    ) -> None:
        """Raises TenantsError, CanaryError, KubernetesError."""
        self.settings = settings
        self.catalog = catalog
        self._tracing = tracing
        self._telemetry = [part for part in (tracing, genai) if part is not None]
        self.draining = False  # not ready any more; requests are still served
        self.refusing = False  # nothing new is taken
        self._followers = list(_followers(settings, catalog))
        self._following_peer_files: asyncio.Task[None] | None = None
        redis = connect(settings.redis_url.get_secret_value()) if settings.redis_url else None
        static = [key.get_secret_value() for key in settings.api_keys]
        self.tenants = Tenants(settings.tenants_file, static, redis)
        self.quota = Quota(RedisLimits(redis) if redis is not None else None, settings.redis_lost)
        self.turns = Turns(settings.tokenizer_threads)
        self.metrics = Metrics(catalog, self.tenants, self.quota, genai)
        self.metrics.draining.set_function(lambda: self.draining)

    def start(self) -> None:
        self.catalog.start()
        for follower in self._followers:
            follower.start()
        self._following_peer_files = asyncio.create_task(self.settings.follow_peer_files())
        self.tenants.start()
        self.quota.start()

    async def stop(self) -> None:
        for follower in self._followers:
            follower.stop()
        if self._following_peer_files is not None:
            self._following_peer_files.cancel()
        await self.catalog.stop()
        await self.tenants.stop()
        await self.quota.stop()
        self.turns.close()
        await asyncio.gather(*(asyncio.to_thread(part.stop) for part in self._telemetry))

    @property
    def ready(self) -> bool:
        # While Redis is lost and requests are refused for that, others may still reach it.
        refusing = self.settings.redis_lost == "refuse" and self.tenants.redis_up is False
        return not self.draining and self.catalog.ready and self.tenants.complete and not refusing

    def find(self, name: str | None, record: RequestRecord) -> Model:
        """Return a model. Raises ApiError when there is none of that name, or the key of the request may not use it."""
        model = self.catalog.find(name, record.identity)
        record.model = model.name
        return model

    def pool(self, model: Model, record: RequestRecord, prompt_tokens: int) -> Pool:
        """Return the pool for a request. Raises ApiError 503 when nothing new is taken."""
        if self.refusing:
            raise overloaded("The server is shutting down.")
        pool = model.pool(record.identity, prompt_tokens)
        record.pool = pool.spec.name
        return pool

    async def reply(
        self,
        model: Model,
        pool: Pool,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        sampling: Iterable[pb.SamplingParams],
        shape: Shape,
        record: RequestRecord,
        *,
        silent: bool = False,
        kept: Sequence[str] = (),
    ) -> Reply:
        """Return the answer that these prompts will have, each with its parameters; sending it sends them to the pods.

        silent: only the prompts matter; what is generated is dropped. kept: special tokens that are a part of the text.
        """
        traceparent = ""
        if self._tracing is not None:
            # Only here, as OpenTelemetry takes a moment and some memory.
            from .telemetry.request_trace import RequestTrace

            trace = RequestTrace(self._tracing, request, model.name, pool.spec.name, record)
            record.end_trace, traceparent = trace.end, trace.traceparent
        pace, salt = Pace(), cache_salt(record.identity)
        submits, choices = [], []
        make_choice: Callable[[], Choice] | None = None
        for prompt, params in zip(prompts, sampling, strict=True):
            make_choice = make_choice or _choices(model, request, params, silent, kept)
            submits.append(
                pb.Submit(
                    request_id=record.request_id,
                    prompt_token_ids=prompt,
                    sampling=params,
                    # The operator's alone: a pod knows no tenants, so a client's would overtake those of others there.
                    priority=record.identity.tenant.priority if record.identity else 0,
                    traceparent=traceparent,
                    cache_scope=_cache_scope(model, salt, prompt),
                )
            )
            choices += [make_choice() for _ in range(request.choices)]
            await pace.breathe()
        record.prompt_tokens = sum(map(len, prompts))
        settings = self.settings
        generation = Generation(
            pool.fleet,
            submits,
            StreamLimits(
                max_unread_tokens=settings.max_unread_tokens,
                max_lost_pods=settings.max_lost_pods,
                queue_timeout_s=settings.queue_timeout_s,
                resume_timeout_s=settings.resume_timeout_s,
            ),
            (record.session or request.user or "")[:MAX_SESSION_CHARS],
            record.identity.name if record.identity else "",
            record.identity.tenant.weight if record.identity else 1.0,
            record.trace_id,
            request.priority or 0,
        )
        options = self._reply_options(request)
        return Reply(generation, choices, shape, options, record, self.metrics, request.choices)

    def _reply_options(self, request: GenerationRequest) -> ReplyOptions:
        usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        return ReplyOptions(
            stream=bool(request.stream),
            usage=usage,
            running_usage=usage
            and request.stream_options is not None
            and bool(request.stream_options.continuous_usage_stats),
            keepalive_s=self.settings.keepalive_s,
            timeout_s=self.settings.request_timeout_s,
        )


def _followers(settings: GatewaySettings, catalog: Catalog) -> "Iterator[CanaryFile | Discovery]":
    """Return what follows the pods and the canaries."""
    if settings.canary_file is not None:
        yield CanaryFile(settings.canary_file, catalog)
    if settings.canary_configmaps or any(pool.spec.selector for _, pool in catalog.pools):
        # Only here, as the client takes a second and 50 MB that a gateway without Kubernetes can do without.
        from .fleet.discovery import Discovery

        yield Discovery(settings, catalog)


def _choices(
    model: Model, request: GenerationRequest, params: pb.SamplingParams, silent: bool, kept: Sequence[str]
) -> Callable[[], Choice]:
    """Return what makes a choice of a request. params: of any of its prompts."""
    stop_ids = frozenset((*params.eos_token_ids, *params.stop_token_ids))
    min_tokens = params.min_tokens

    def make() -> Choice:
        return Choice(
            model.served.tokenizer.detokenizer(request.skip_special_tokens is not False, kept),
            stops=request.stop or (),
            stop_ids=stop_ids,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=min_tokens,
            silent=silent,
        )

    return make


def _cache_scope(model: Model, salt: bytes, prompt: Sequence[int]) -> pb.CacheScope | None:
    return pb.CacheScope(salt=salt, shared_tokens=model.served.published.shared_tokens(prompt)) if salt else None
