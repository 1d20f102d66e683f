"""Follows Kubernetes objects: a copy of them that is current as long as the API server can be reached."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import urllib3
from kubernetes.client import ApiException
from kubernetes.watch import Watch

log = logging.getLogger(__name__)

_WATCH_S = 30  # the server ends a watch after so long; a connection of which only one end is left is noticed then
_GRACE_S = 10
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
_GONE = 410

Objects = Mapping[str, Any]


class ObjectWatch:
    """Lists objects, then watches what becomes of them, in a thread, as the client library is not made for asyncio.

    While the API server is away what was known of it stays.
    """

    def __init__(
        self,
        what: str,
        list_call: Callable[..., Any],
        changed: Callable[[Objects], None],
        failed: Callable[[], None] = lambda: None,
        **selection: Any,
    ) -> None:
        """what: for the log. list_call: of the client library, with its arguments in `selection`.

        changed: gets all objects by name, in the event loop that called `start`, at first and after each change.
        failed: called in the thread when something went wrong that no API server should cause.
        """
        self._what = what
        self._list = list_call
        self._changed = changed
        self._failed = failed
        self._selection = selection
        self._watch = Watch()
        self._stopped = threading.Event()
        self._objects: dict[str, Any] = {}
        self._version = ""
        self._lost = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name=f"watch {self._what}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._watch.stop()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._stopped.is_set():
            try:
                if not self._version:
                    self._relist(loop)
                self._follow(loop)
            except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
                status, why = (error.status, error.reason) if isinstance(error, ApiException) else (None, str(error))
                if status == _GONE:  # what has changed since is not kept any more
                    self._version = ""
                    continue
                self._note(lost=True, why=str(why))
                # An answer means that the server has another view than ours; without one only the way to it is broken.
                if status is not None:
                    self._version = ""
            except Exception as error:  # whatever it was, the thread must not end: nobody would follow the objects
                self._failed()
                self._note(lost=True, why=type(error).__name__)
                self._version = ""
            else:
                retry_s = _FIRST_RETRY_S
                continue
            self._stopped.wait(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _relist(self, loop: asyncio.AbstractEventLoop) -> None:
        listed = self._list(**self._selection, _request_timeout=_GRACE_S)
        self._objects = {item.metadata.name: item for item in listed.items}
        self._version = listed.metadata.resource_version
        self._note(lost=False)
        self._publish(loop)

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        events = self._watch.stream(
            self._list,
            **self._selection,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _request_timeout=(_GRACE_S, _WATCH_S + _GRACE_S),
        )
        for event in events:
            if self._stopped.is_set():
                return
            self._note(lost=False)
            self._version = str(self._watch.resource_version)
            if event["type"] == "BOOKMARK":
                continue
            item = event["object"]
            if event["type"] == "DELETED":
                self._objects.pop(item.metadata.name, None)
            else:
                self._objects[item.metadata.name] = item
            self._publish(loop)

    def _publish(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self._changed, dict(self._objects))
        except RuntimeError:  # the loop is closed
            self._stopped.set()

    def _note(self, lost: bool, why: str = "") -> None:
        if lost and not self._lost:
            log.warning("%s cannot be followed: %s", self._what, why, extra={"event": "kubernetes_lost"})
        elif self._lost and not lost:
            log.info("%s can be followed again", self._what, extra={"event": "kubernetes_back"})
        self._lost = lost
