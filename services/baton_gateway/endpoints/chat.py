"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton_proto import serving_pb2 as pb

from ..answers.chat_shape import ChatShape
from ..answers.reply import Reply
from ..concurrency.pace import Pace
from ..fleet.catalog import Model, Pool
from ..reading.parts import MakeReader
from ..requests.answer_format import AnswerFormat, answer_format
from ..requests.bodies import ChatCompletionRequest
from ..requests.chat_messages import read_conversation
from ..requests.grammar import CHAT_FORMAT, FormatFields, grammar_of
from ..requests.sampling import (
    bad_word_tokens,
    check_scored,
    fit_prompt,
    output_budget,
    prompt_length,
    sampling_params,
)
from ..telemetry.record import RequestRecord
from .intake import admit
from .services import Services


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request as a prompt and parameters for the pods of a pool, and how its answer is read.

    reader: creates a reader of thoughts and tool calls for each choice; None = the answer has neither. kept: special
    tokens that must stay in the text, because they mark thoughts or tool calls.
    """

    model: Model
    pool: Pool
    prompt: list[int]
    sampling: pb.SamplingParams
    reader: MakeReader | None
    kept: Sequence[str]


async def prepare_chat(
    services: Services,
    request: ChatCompletionRequest,
    record: RequestRecord,
    param: str = "messages",
    format_fields: FormatFields = CHAT_FORMAT,
) -> PreparedChat:
    """Reserve quota for a chat and turn it into tokens and parameters. Raises ApiError when it cannot be served.

    param, format_fields: the client's names of the fields that an error may name.
    """
    model = await admit(services, request, record)
    served = model.served

    def prepare() -> tuple[AnswerFormat, list[int], list[pb.TokenSequence]]:
        given = grammar_of(request, services.settings, format_fields)
        tools = None if request.tool_choice == "none" else request.tools
        conversation = read_conversation(request, request.messages, tools, served.thoughts, param)
        token_ids = served.chat_tokens(conversation)
        written = answer_format(request, served, given, conversation, token_ids)
        return written, token_ids, bad_word_tokens(request.bad_words or (), served.tokenizer)

    with record.tokenizing():
        written, token_ids, bad_words = await services.turns.run(prepare, record.body_bytes, record.client)
    pool = services.catalog.pool(model, record.identity, prompt_length(request, token_ids))
    record.pool = pool.spec.name
    limits = pool.limits()
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    pace = Pace()
    prompt = fit_prompt(token_ids, request, max_tokens, limits, param)
    await pace.yield_to_loop()
    check_scored(len(prompt), request.prompt_logprobs, "prompt_logprobs")
    sampling = sampling_params(
        request,
        served,
        limits,
        max_tokens=output_budget(len(prompt), max_tokens, limits, param),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        grammar=written.grammar,
        bad_words=bad_words,
    )
    return PreparedChat(model, pool, prompt, sampling, written.reader, written.markers)


async def chat_completion(services: Services, request: ChatCompletionRequest, record: RequestRecord) -> Reply:
    """Answer a chat request. Raises ApiError when it cannot be served."""
    chat = await prepare_chat(services, request, record)
    shape = ChatShape(
        id=f"chatcmpl-{record.request_id}",
        created=int(time.time()),
        model=chat.model.name,
        tokenizer=chat.model.served.tokenizer,
        prompt_token_ids=chat.prompt,
        token_ids=bool(request.return_token_ids),
        logprobs=bool(request.logprobs),
        prompt_logprobs=request.prompt_logprobs is not None,
    )
    return await services.replies.make_reply(
        chat.model,
        chat.pool,
        request,
        [chat.prompt],
        [chat.sampling],
        shape,
        record,
        kept=chat.kept,
        reader=chat.reader,
    )
