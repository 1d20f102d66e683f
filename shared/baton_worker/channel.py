"""Messages over a Unix socket pair: a 4-byte length, then msgpack."""

import asyncio
import contextlib
import select
import socket
import struct
from typing import Any

import msgspec

from .messages import Command, Event

_HEADER = struct.Struct("<I")
# Room for many steps' output, so that a busy RPC process does not delay the engine.
_BUFFER_BYTES = 8 << 20


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


def encode(message: Command | Event) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


class EngineEnd:
    """The engine's end. The engine polls for commands between steps, and waits for commands when it has no work."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._pending = bytearray()

    def send(self, event: Event) -> None:
        self._sock.sendall(encode(event))

    def receive(self, timeout: float | None) -> list[Command]:
        """Return the commands that have arrived. If there are none, wait `timeout` seconds for one; None: forever.

        Raises EOFError when the other end is closed.
        """
        commands = self._decode()
        while not commands:
            readable, _, _ = select.select([self._sock], [], [], timeout)
            if not readable:
                break
            data = self._sock.recv(1 << 20)
            if not data:
                raise EOFError
            self._pending += data
            commands = self._decode()
        return commands

    def _decode(self) -> list[Command]:
        commands: list[Command] = []
        at = 0
        while len(self._pending) - at >= _HEADER.size:
            [size] = _HEADER.unpack_from(self._pending, at)
            end = at + _HEADER.size + size
            if len(self._pending) < end:
                break
            commands.append(self._decoder.decode(self._pending[at + _HEADER.size : end]))
            at = end
        del self._pending[:at]
        return commands


class RpcEnd:
    """The RPC process's end, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Event)

    @classmethod
    async def open(cls, sock: socket.socket) -> "RpcEnd":
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        return cls(reader, writer)

    def send(self, command: Command) -> None:
        self._writer.write(encode(command))

    async def drained(self) -> None:
        """Wait while the engine has too much left to read. Only `receive` reports that the engine is gone."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> Event:
        """Return the next event. Raises asyncio.IncompleteReadError when the engine is gone."""
        [size] = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        event: Event = self._decoder.decode(await self._reader.readexactly(size))
        return event

    def close(self) -> None:
        self._writer.close()
