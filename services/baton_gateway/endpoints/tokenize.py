"""POST /tokenize and POST /detokenize."""

import msgspec
from starlette.responses import Response

from ..answers.shapes import encoded_list
from ..answers.whole_answer import WholeAnswer
from ..errors import bad_request
from ..requests.bodies import DetokenizeRequest, TokenizeRequest
from ..requests.chat_messages import read_conversation
from ..telemetry.record import RequestRecord
from .intake import admit
from .services import Services


async def to_tokens(services: Services, body: TokenizeRequest, record: RequestRecord) -> Response:
    """Answer with the tokens of a text or a conversation. Raises ApiError when it cannot be served."""
    model = await admit(services, body, record)
    served, max_model_len = model.served, model.max_model_len(record.identity)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either 'prompt' or 'messages'.", "prompt")

    def tokens() -> list[int]:
        if body.messages is not None:
            return served.chat_tokens(read_conversation(body, body.messages, body.tools, served.thoughts))
        return served.tokenizer.encode_now(body.prompt or "", body.add_special_tokens is not False)

    def answer() -> tuple[bytes, int]:
        found = tokens()
        parts = [b'{"count":%d,"max_model_len":%b,"tokens":' % (len(found), msgspec.json.encode(max_model_len))]
        parts += encoded_list(found)
        parts.append(b',"token_strs":')
        parts += encoded_list(map(served.tokenizer.token_text, found)) if body.return_token_strs else (b"null",)
        return b"".join([*parts, b"}"]), len(found)

    content, count = await services.turns.run(answer, record.body_bytes, record.client)
    if record.reservation is not None:
        record.reservation.used = count
    return WholeAnswer(content, services.replies.memory(record, keeps=True))


async def to_text(services: Services, body: DetokenizeRequest, record: RequestRecord) -> Response:
    """Answer with the text of some tokens. Raises ApiError when it cannot be served."""
    tokenizer = (await admit(services, body, record)).served.tokenizer

    def decode() -> bytes:
        return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    content = await services.turns.run(decode, len(body.tokens), record.client)
    return WholeAnswer(content, services.replies.memory(record, keeps=True))
