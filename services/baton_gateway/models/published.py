"""Prompt prefixes that an operator has published. All tenants may share their cached KV blocks."""

from array import array
from collections.abc import Iterable, Sequence

from ..errors import ApiError
from .chat_tokens import ChatTokens
from .conversation import Conversation
from .models_file import PublishedPrefix
from .tokenizer import ModelTokenizer

# Two possible user messages after the published messages. They have no common prefix.
_NEXT_TURNS = ("0", "a")
_ID_BYTES = array("I").itemsize


class PublishedPrefixes:
    """The published prompt prefixes of one model, as token ids."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        self._prefixes = [array("I", prefix).tobytes() for prefix in prefixes]
        self._longest = max(map(len, self._prefixes), default=0) // _ID_BYTES

    def shared_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens at the beginning of a prompt are published."""
        if not self._prefixes:
            return 0
        prompt = array("I", token_ids[: self._longest]).tobytes()
        return max(_common_bytes(prefix, prompt) for prefix in self._prefixes) // _ID_BYTES


def publish(specs: Iterable[PublishedPrefix], tokenizer: ModelTokenizer, chat: ChatTokens | None) -> PublishedPrefixes:
    """Tokenize published prefixes as the model's requests are tokenized. Raises ValueError for one that cannot be."""
    return PublishedPrefixes([_tokens(spec, tokenizer, chat) for spec in specs])


def _tokens(spec: PublishedPrefix, tokenizer: ModelTokenizer, chat: ChatTokens | None) -> list[int]:
    if spec.text:
        return tokenizer.encode_now(spec.text, add_special_tokens=True)
    if chat is None:
        raise ValueError("published_prefixes: the model has no chat template, so give a text instead of messages")
    messages = [{"role": message.role, "content": message.content} for message in spec.messages]
    try:
        # Some templates move a system message into the next user message, so the conversation needs one.
        prompts = [_encode(chat, [*messages, {"role": "user", "content": turn}]) for turn in _NEXT_TURNS]
    except ApiError:
        try:
            prompts = [_encode(chat, messages)]
        except ApiError as error:
            raise ValueError(f"published_prefixes: {error.message}") from None
    first, *others = prompts
    data = array("I", first).tobytes()
    return first[
        : min((_common_bytes(data, array("I", ids).tobytes()) for ids in others), default=len(data)) // _ID_BYTES
    ]


def _encode(chat: ChatTokens, messages: list[dict[str, str]]) -> list[int]:
    conversation = Conversation(
        messages=messages,
        add_generation_prompt=False,
        continue_final_message=False,
        variables={},
        tools=None,
        add_special_tokens=False,
        param="messages",
    )
    return chat.encode(conversation)


def _common_bytes(first: bytes, second: bytes) -> int:
    """Return the length of the longest common prefix, by bisection over comparisons that take microseconds."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
