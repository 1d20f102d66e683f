"""Builds a reply from prompts and parameters. The reply sends them to pods, and the pods' answer to the client."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from baton_proto import serving_pb2 as pb

from ..bounds import MAX_SESSION_CHARS
from ..concurrency.pace import Pace
from ..fleet.catalog import Model, Pool
from ..generation.answer_memory import AnswerMemory, TenantMemory
from ..generation.generation import Generation
from ..reading.parts import MakeReader
from ..requests.bodies import ChatCompletionRequest, GenerationRequest, StreamOptions
from ..settings import GatewaySettings
from ..telemetry.metrics import Metrics
from ..telemetry.record import RequestRecord
from ..tenancy.cache_salt import cache_salt
from .choice import Choice
from .reply import Reply, ReplyOptions
from .shapes import Shape

if TYPE_CHECKING:
    from baton_common.tracing import Tracing


class ReplyMaker:
    """Builds the replies to requests whose prompts and parameters are known."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics, tracing: "Tracing | None") -> None:
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._memory: WeakValueDictionary[str, TenantMemory] = WeakValueDictionary()  # of tenants with running answers

    async def make_reply(
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
        reader: MakeReader | None = None,
    ) -> Reply:
        """Return the reply to these prompts, each with its parameters. Sending the reply submits them to the pods.

        silent: generated tokens are dropped, since the client asked for none. kept: special tokens that stay in the
        text. reader: creates a reader of thoughts and tool calls for each choice; None = all of it is content.
        """
        pace, published = Pace(), model.served.published
        choices: list[Choice] = []
        submits: list[pb.Submit] = []
        make_choice: Callable[[], Choice] | None = None
        traceparent = self._trace(model, pool, request, record)
        salt = cache_salt(record.identity)
        for prompt, params in zip(prompts, sampling, strict=True):
            make_choice = make_choice or _choice_maker(model, request, params, silent, kept, reader)
            scope = pb.CacheScope(salt=salt, shared_tokens=published.shared_tokens(prompt)) if salt else None
            submits.append(
                pb.Submit(
                    request_id=record.request_id,
                    prompt_token_ids=prompt,
                    sampling=params,
                    # Only the tenant's priority, which the operator sets. A pod compares the priorities of all
                    # tenants, so a client's own priority would let it overtake other tenants there.
                    priority=record.identity.tenant.priority if record.identity else 0,
                    traceparent=traceparent,
                    cache_scope=scope,
                )
            )
            choices += [make_choice() for _ in range(request.choices)]
            await pace.yield_to_loop()
        record.prompt_tokens = sum(map(len, prompts))
        memory = self.memory(record, keeps=shape.keeps or not request.stream)
        generation = Generation(
            pool.fleet,
            prompts,
            submits,
            self._settings,
            memory,
            (record.session or request.user or "")[:MAX_SESSION_CHARS],
            record.identity.name if record.identity else "",
            record.identity.tenant.weight if record.identity else 1.0,
            record.trace_id,
            request.priority or 0,
        )
        return Reply(generation, choices, shape, self._options(request), record, self._metrics, request.choices, memory)

    def memory(self, record: RequestRecord, keeps: bool) -> AnswerMemory:
        """Return the memory of a new answer, which counts for the request's tenant."""
        return AnswerMemory(self._memory.setdefault(record.client.tenant, TenantMemory()), keeps)

    def _trace(self, model: Model, pool: Pool, request: GenerationRequest, record: RequestRecord) -> str:
        """Begin the span of a request if tracing is on. Return the `traceparent` for the pods, or ""."""
        if self._tracing is None:
            return ""
        # Imported only when needed, because OpenTelemetry takes time to import and memory.
        from ..telemetry.request_trace import Operation, RequestTrace

        operation: Operation = "chat" if isinstance(request, ChatCompletionRequest) else "text_completion"
        trace = RequestTrace(self._tracing, operation, request, model.name, pool.spec.name, record)
        record.end_trace = trace.end
        return trace.traceparent

    def _options(self, request: GenerationRequest) -> ReplyOptions:
        asked = request.stream_options or StreamOptions()
        return ReplyOptions(
            stream=bool(request.stream),
            usage=bool(asked.include_usage),
            running_usage=bool(asked.include_usage and asked.continuous_usage_stats),
            keepalive_s=self._settings.keepalive_s,
            timeout_s=self._settings.request_timeout_s,
        )


def _choice_maker(
    model: Model,
    request: GenerationRequest,
    params: pb.SamplingParams,
    silent: bool,
    kept: Sequence[str],
    reader: MakeReader | None,
) -> Callable[[], Choice]:
    """Return a function that creates the choices of a request. params: the parameters of any of its prompts."""
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
            reader=reader() if reader is not None else None,
        )

    return make
