"""Odd protobuf messages: valid ones with some fields changed, and bytes that are no message."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb

_FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-38, 3e38, 1.0)
_TEXTS = ("", "\0", "x", "é" * 40, "../..", "127.0.0.1:1", "127.0.0.1:99999", "unix:/tmp/x", "dns:///example.com:80")
_INTS = (0, 1, 2, 15, 16, 255, 2_047, 65_536, (1 << 31) - 1)
_MOST = {
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.TYPE_FIXED64: (1 << 64) - 1,
    FieldDescriptor.TYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.TYPE_ENUM: 1_000,
}


class Odd:
    """Makes messages from a seed; `vocab` and `context` are those of the model."""

    def __init__(self, seed: int, vocab: int, context: int) -> None:
        self.random = random.Random(seed)
        self._vocab = vocab
        self._context = context

    def submit(self, prefills: list[str]) -> pb.GatewayMessage:
        rng = self.random
        order = pb.Submit(
            handle=rng.randrange(1, 40),
            request_id=f"odd-{rng.randrange(1000)}",
            prompt_token_ids=self._prompt(),
            sampling=self._sampling(),
            prefill_addresses=rng.choices(prefills, k=rng.randrange(3)),
        )
        return pb.GatewayMessage(submit=order)

    def to_decode(self, prefills: list[str]) -> pb.GatewayMessage:
        """prefills: addresses that orders and Peers may name."""
        rng = self.random
        kind = rng.random()
        if kind < 0.6:
            message = self.submit(prefills)
        elif kind < 0.8:
            cancel = pb.Cancel(handle=rng.randrange(1, 40), choice=rng.choice([None, 0, 1, 1 << 31]))
            message = pb.GatewayMessage(cancel=cancel)
        else:
            peers = pb.Peers(prefill_addresses=rng.choices([*prefills, *_TEXTS], k=rng.randrange(4)))
            message = pb.GatewayMessage(peers=peers)
        return self.changed(message)

    def to_prefill(self) -> kv.DecodeToPrefill:
        rng = self.random
        number = rng.randrange(1, 40)
        kind = rng.choice(["ticket", "ticket", "ticket", "ack", "cancel", "renew", "gpu_pair", "hello"])
        reference = kv.TicketRef(ticket_id=number)
        value: dict[str, Any] = {
            "ack": reference,
            "cancel": reference,
            "renew": kv.Renew(ticket_ids=rng.choices(range(40), k=rng.randrange(6)), lease_ms=rng.choice([0, 1, 500])),
            "gpu_pair": rng.choice([kv.GpuPair(up=True), kv.GpuPair(lost="x"), kv.GpuPair(id=bytes(128))]),
            "hello": kv.Hello(epoch=number, fingerprint="x"),
        }
        if kind == "ticket":
            prompt = self._prompt()
            value["ticket"] = kv.Ticket(
                ticket_id=number,
                prompt_token_ids=prompt,
                sampling=self._sampling(),
                first_token=rng.choice([0, 0, 1, len(prompt) - 1, len(prompt), 1 << 31]),
                generation=1,
                lease_ms=rng.choice([0, 20, 200, 2_000]),
            )
        return self.changed(kv.DecodeToPrefill(**{kind: value[kind]}))

    def from_prefill(self, tickets: dict[int, kv.Ticket]) -> kv.PrefillToDecode:
        """tickets: those that a decode pod has sent."""
        rng = self.random
        number = rng.choice([*tickets, rng.randrange(1, 100)])
        ticket = tickets.get(number)
        count = ticket.sampling.n if ticket is not None else 1
        deltas = [
            pb.Delta(
                choice=choice, token_ids=[rng.randrange(self._vocab)], prompt=pb.PromptInfo() if not choice else None
            )
            for choice in range(min(count, 4))
        ]
        kind = rng.choice(["first_tokens", "first_tokens", "failed", "alive", "gpu_pair", "welcome"])
        value: dict[str, Any] = {
            "first_tokens": kv.FirstTokens(ticket_id=number, deltas=deltas),
            "failed": kv.TicketFailed(ticket_id=number, failure=pb.Failure(code=pb.Failure.CODE_INTERNAL)),
            "alive": kv.Alive(),
            "gpu_pair": rng.choice([kv.GpuPair(id=b"x"), kv.GpuPair(id=bytes(128)), kv.GpuPair(lost="x")]),
            "welcome": kv.Welcome(epoch=1, session=2),
        }
        return self.changed(kv.PrefillToDecode(**{kind: value[kind]}))

    def announcement(self, epoch: int, tickets: dict[int, kv.Ticket]) -> kv.PieceHeader:
        """The header of a piece; some announce bytes from GPU to GPU, where pods without a GPU have none."""
        rng = self.random
        number = rng.choice([*tickets, rng.randrange(1, 100)])
        header = kv.PieceHeader(
            epoch=epoch,
            ticket_id=number,
            generation=tickets[number].generation if number in tickets else 1,
            first_token=rng.randrange(64),
            num_tokens=rng.randrange(64),
            num_layers=rng.randrange(4),
            num_heads=rng.randrange(4),
            gpu_bytes=rng.choice([0, 0, 1, 4096, 1 << 40]),
        )
        changed = self.changed(header)
        assert isinstance(changed, kv.PieceHeader)
        return changed

    def changed(self, message: Any) -> Any:
        """Change some fields of a message, in half of all cases none."""
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 2, 6])):
            self._change(message)
        return message

    def data(self, message: Message) -> bytes:
        """Return the bytes of a message, at times damaged, cut or others altogether."""
        rng, data = self.random, message.SerializeToString()
        dice = rng.random()
        if dice < 0.004:
            return rng.randbytes(rng.choice([1, 10, 1_000]))
        if dice < 0.008:
            return data[: rng.randrange(len(data) + 1)]
        if dice < 0.012 and data:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        return data

    def _prompt(self) -> list[int]:
        rng = self.random
        if rng.random() < 0.01:
            return [1] * rng.choice([self._context, self._context + 1, 3 * self._context, 100_000])
        return [rng.randrange(self._vocab) for _ in range(rng.randrange(1, 80))]

    def _sampling(self) -> pb.SamplingParams:
        rng = self.random
        params = pb.SamplingParams(
            max_tokens=rng.choice([1, 1, 2, 8]), top_p=1, repetition_penalty=1, n=rng.choice([1, 1, 1, 2, 5])
        )
        if rng.random() < 0.1:
            params.n = rng.choice([0, 129, 1 << 20, (1 << 32) - 1])
        if rng.random() < 0.03:
            params.grammar.kind = rng.choice(pb.Grammar.Kind.values())  # type: ignore[assignment]
            params.grammar.text = rng.choice(["", "[a-z]+", "{", '{"type": "object"}', '["a"]', "x" * 70_000])
        return params

    def _change(self, message: Any) -> None:
        rng = self.random
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        held = [field for field, _ in message.ListFields()]
        field = rng.choice(held if held and rng.random() < 0.8 else fields)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.choice([1, 3, 200])):
                getattr(message, field.name)[rng.randrange(1 << 32)] = rng.choice(_FLOATS)
        elif field.is_repeated:
            values = getattr(message, field.name)
            count = rng.choice([1, 2, 50] if rng.random() < 0.98 else [20_000])
            if field.message_type is not None:
                for _ in range(min(count, 2_000)):
                    values.add()
            else:
                values.extend([self._value(field) for _ in range(count)])
        elif field.message_type is not None:
            self._change(getattr(message, field.name))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        rng, kind = self.random, field.type
        if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return rng.choice(_FLOATS)
        if kind == FieldDescriptor.TYPE_STRING:
            return "y" * 5_000 if rng.random() < 0.02 else rng.choice(_TEXTS)
        if kind == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 32, 33, 128, 2_000]))
        if kind == FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        return rng.choice([*_INTS, _MOST[kind], rng.randrange(_MOST[kind])])
