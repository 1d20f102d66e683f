"""Checks peers' messages against limits, in time linear in a message's size and before anything is built from it.

Each function raises MessageRefused. When a client causes a violation, only its request is refused. The other limits are
far beyond what correct peers send.
"""

from baton_common.peer_refusals import MessageRefused
from baton_common.rank_parts import MOST_RANKS
from baton_engine.sequence import Request
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb

from .messages import Ready

# The most open requests or tickets of one connection, and their tokens. A token takes some 40 bytes in this process and
# the engine together.
MOST_OPEN = 16_384
MOST_OPEN_TOKENS = 16 << 20
# The most answers that may wait because the peer does not read them.
MOST_UNREAD = 65_536
MOST_LEASE_MS = 3_600_000
MOST_ADDRESSES = 1_024

_MOST_NAME_CHARS = 1_024
_MOST_FINGERPRINT_CHARS = 256
_MOST_BAD_WORDS = 16_384
_MOST_STOPS = 65_536
_MOST_BIASES = 65_536
_FINISH_REASONS = frozenset(pb.FinishReason.values()) - {pb.FINISH_REASON_ERROR}  # of an answer without a failure
# The bound of the times of one prompt. A single time that no prompt can take would spoil the sums of the metrics until
# a restart.
_MOST_SECONDS = 86_400
_MESSAGE_BYTES = 8 << 20  # of all fields but the tokens of prompt and output
_TOKEN_BYTES = 5  # of the largest token id as a varint


def most_message_bytes(max_model_len: int) -> int:
    """Return the size of the largest message that a worker's server accepts."""
    return _MESSAGE_BYTES + 2 * _TOKEN_BYTES * max_model_len


def check_submit(submit: pb.Submit, ready: Ready) -> None:
    _check_order(submit, ready)
    if len(submit.prefill_addresses) > MOST_ADDRESSES:
        raise _field("prefill_addresses", f"more than {MOST_ADDRESSES}")
    for address in submit.prefill_addresses:
        check_address(address, "prefill_addresses")


def check_peers(peers: pb.Peers) -> None:
    if len(peers.prefill_addresses) > MOST_ADDRESSES:
        raise _field("prefill_addresses", f"more than {MOST_ADDRESSES}")
    for address in peers.prefill_addresses:
        check_address(address, "prefill_addresses")


def check_address(address: str, field: str) -> None:
    """Raise when an address is not host:port, with IPv6 addresses in brackets."""
    host, colon, port = address.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    sound = 0 < len(plain) <= 255 and all(char.isalnum() or char in "-._:" for char in plain)
    if not (address.isascii() and colon and sound and _is_port(port)):
        raise _field(field, "an address is not host:port")


def check_hello(hello: kv.Hello) -> None:
    for field in ("fingerprint", "kv_format"):
        if len(getattr(hello, field)) > _MOST_FINGERPRINT_CHARS:
            raise _field(field, f"longer than {_MOST_FINGERPRINT_CHARS} characters")
    if len(hello.gpus) > MOST_RANKS or any(len(gpu) > _MOST_FINGERPRINT_CHARS for gpu in hello.gpus):
        raise _field("gpus", f"more than {MOST_RANKS}, or longer than {_MOST_FINGERPRINT_CHARS} characters")


def check_ticket(ticket: kv.Ticket, ready: Ready) -> None:
    _check_order(ticket, ready)
    known = len(ticket.prompt_token_ids) + len(ticket.continuation.token_ids)
    if ticket.first_token >= max(known, 1):
        raise _field("first_token", "beyond the prompt")
    _check_lease(ticket.lease_ms)


def check_renew(renew: kv.Renew) -> None:
    if len(renew.ticket_ids) > MOST_OPEN:
        raise _field("ticket_ids", f"more than {MOST_OPEN}")
    _check_lease(renew.lease_ms)


def check_request(request: Request, ready: Ready) -> None:
    """Raise when the engine can never run a request, with the engine's own reason."""
    problem = request.error(ready.vocab_size, ready.max_model_len, ready.max_num_seqs)
    if problem is not None:
        raise MessageRefused("request", *problem)


def check_first_tokens(message: kv.FirstTokens, order: pb.Submit, ready: Ready) -> None:
    """Raise when a prefill pod's first tokens are not one valid token for each choice of an order."""
    sampling, begun = order.sampling, order.continuation
    first = begun.choice
    if sorted(delta.choice for delta in message.deltas) != list(range(first, first + sampling.n)):
        raise _field("deltas", "not one per choice")
    for delta in message.deltas:
        if len(delta.token_ids) != 1 or delta.token_ids[0] >= ready.vocab_size:
            raise _field("token_ids", "not one token of the vocabulary")
        if delta.offset != len(begun.token_ids):
            raise _field("offset", "not the number of tokens before it")
        if delta.finish_reason not in _FINISH_REASONS or delta.HasField("failure"):
            raise _field("finish_reason", "unknown")
        _check_logprobs("logprobs", delta.logprobs, 1, sampling.logprobs, ready.vocab_size)
        if delta.HasField("prompt"):
            _check_prompt(delta.prompt, order, ready)


def _check_order(order: pb.Submit | kv.Ticket, ready: Ready) -> None:
    """Check the sizes of an order's fields before they are copied into a request."""
    sampling = order.sampling
    # Twice the context, so that a client's prompt that is a little too long is refused as a request, with its reason.
    if len(order.prompt_token_ids) + len(order.continuation.token_ids) > 2 * ready.max_model_len + MOST_OPEN:
        raise _field("prompt_token_ids", "more than twice the context")
    for name, count, most in (
        ("request_id", len(order.request_id), _MOST_NAME_CHARS),
        ("traceparent", len(order.traceparent), _MOST_NAME_CHARS),
        ("sampling.grammar.param", len(sampling.grammar.param), _MOST_NAME_CHARS),
        ("sampling.bad_words", len(sampling.bad_words), _MOST_BAD_WORDS),
        ("sampling.stop_token_ids", len(sampling.stop_token_ids), _MOST_STOPS),
        ("sampling.eos_token_ids", len(sampling.eos_token_ids), _MOST_STOPS),
        ("sampling.logit_bias", len(sampling.logit_bias), _MOST_BIASES),
    ):
        if count > most:
            raise _field(name, f"more than {most}")


def _check_lease(lease_ms: int) -> None:
    if lease_ms > MOST_LEASE_MS:
        raise _field("lease_ms", f"above {MOST_LEASE_MS}")


def _check_prompt(prompt: pb.PromptInfo, order: pb.Submit, ready: Ready) -> None:
    times = prompt.queued_seconds, prompt.prefill_seconds
    if not all(0 <= seconds <= _MOST_SECONDS for seconds in times):
        raise _field("prompt", f"a time is not between 0 and {_MOST_SECONDS} seconds")
    if prompt.cached_tokens > len(order.prompt_token_ids) + len(order.continuation.token_ids):
        raise _field("prompt.cached_tokens", "more than the prompt")
    most, counts = len(order.prompt_token_ids), order.sampling.prompt_logprobs
    _check_logprobs("prompt.logprobs", prompt.logprobs, most, counts, ready.vocab_size)


def _check_logprobs(field: str, entries: "list[pb.TokenLogprobs]", most: int, top: int, vocab_size: int) -> None:
    if len(entries) > most:
        raise _field(field, "more entries than tokens")
    for entry in entries:
        ids = entry.top_token_ids
        if len(ids) > top or len(ids) != len(entry.top_logprobs) or max(entry.token_id, *ids, 0) >= vocab_size:
            raise _field(field, "not the alternatives that were requested")


def _is_port(text: str) -> bool:
    return len(text) <= 5 and text.isascii() and text.isdigit() and 0 < int(text) <= 65_535


def _field(name: str, problem: str) -> MessageRefused:
    return MessageRefused("field", name, problem)
