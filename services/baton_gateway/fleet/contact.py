"""The connection between a gateway and one pod."""

import asyncio
from collections.abc import Callable

import grpc.aio

from baton_common.peer_rpc import open_channel
from baton_common.peer_tls import PeerTls
from baton_common.peer_token import PeerToken
from baton_proto import serving_pb2 as pb

from ..concurrency.background import keep_running
from ..routing.pods import Pod
from ..routing.prefix_index import PrefixIndex
from .decode_link import DecodeLink
from .watcher import CHANNEL_OPTIONS, Watcher


class Contact:
    """Follows a pod's reports. With a decode pod it also has a link, which carries requests."""

    def __init__(
        self,
        pod: Pod,
        role: pb.Role,
        index: PrefixIndex,
        timeout_s: float,
        changed: Callable[["Contact"], None],
        tls: PeerTls | None,
        token: PeerToken | None,
        require_cache_scopes: bool = False,
    ) -> None:
        """index, timeout_s, require_cache_scopes: as in Watcher.

        changed: called whenever the pod may have become live or lost.
        """
        self.pod = pod
        self._changed = changed
        self._tls = tls
        self._token = token
        self._renewals = tls.renewals if tls is not None else 0
        self._channel = self._open_channel()
        self.link = DecodeLink(pod, lambda: self._channel, self._report_change) if role == pb.ROLE_DECODE else None
        watcher = Watcher(pod, role, self._current_channel, index, timeout_s, self._reported, require_cache_scopes)
        self._watching = keep_running("pod reports", watcher.run)

    async def end(self) -> None:
        """Close the connection. Requests that are still on the link are lost."""
        self._watching.cancel()
        if self.link is not None:
            self.link.close()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close()

    async def _current_channel(self) -> grpc.aio.Channel:
        """Return the channel for the next attempt. A new one is opened when the certificate has been renewed."""
        if self._tls is not None and self._renewals != self._tls.renewals:
            self._renewals = self._tls.renewals
            old, self._channel = self._channel, self._open_channel()
            await old.close()
        return self._channel

    def _open_channel(self) -> grpc.aio.Channel:
        return open_channel(self.pod.address, CHANNEL_OPTIONS, self._tls, self._token)

    def _reported(self, pod: Pod) -> None:
        if self.link is not None:
            if pod.reporting:
                self.link.open()
            else:
                self.link.close()
        self._report_change(pod)

    def _report_change(self, _pod: Pod) -> None:
        self._changed(self)
