"""Follows Kubernetes objects: keeps a copy of them that is current while the API server can be reached."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import urllib3
from kubernetes.client import ApiException
from kubernetes.watch import Watch

log = logging.getLogger(__name__)

_WATCH_S = 30  # the server ends a watch after this time, so that a half-open connection is noticed
_GRACE_S = 10
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
_GONE = 410

Objects = Mapping[str, Any]


class ObjectWatch:
    """Lists objects, then watches their changes. It uses a thread, because the client library does not support asyncio.

    While the API server cannot be reached, the copy stays as it was.
    """

    def __init__(
        self,
        what: str,
        list_call: Callable[..., Any],
        changed: Callable[[Objects], None],
        failed: Callable[[], None] = lambda: None,
        **selection: Any,
    ) -> None:
        """what: the objects' name in logs. list_call: a method of the client library; selection: its arguments.

        changed: called with all objects by name, after the first list and each change, in the event loop of `start`.
        failed: called in the thread after an exception that is neither an API error nor a connection error.
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
                if status == _GONE:  # the server no longer keeps the changes since this version: list again
                    self._version = ""
                    continue
                self._note(lost=True, why=str(why))
                # An error response may mean that our version is invalid, so list again. Without a response only the
                # connection is broken, and the watch can go on from the same version.
                if status is not None:
                    self._version = ""
            except Exception as error:  # the thread must go on after any error, or the copy would become stale
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
