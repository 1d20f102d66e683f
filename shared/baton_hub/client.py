"""Requests to a hub, with the session, the token and the errors of huggingface_hub."""

import http
import logging
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import TypeVar

import httpx2
import msgspec
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from .errors import HubError, explain
from .model_id import HubModel

# Otherwise the library asks the hub for a list of coding agents, in order to name the one that runs this process.
constants.HF_HUB_DISABLE_TELEMETRY = True

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_CHUNK = 1 << 16  # bytes; when a connection breaks, at most as many are lost
_LARGEST_REQUEST = 16 << 30  # bytes; the hub's CDN sends at most 50 GB in one answer
_FAILURES_IN_A_ROW = 5
_LARGEST_ANSWER = 64 << 20  # bytes of JSON
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT_S = 60.0


class Stopped(Exception):
    """Another part of the download failed, or the user interrupted it."""


class Retries:
    """Waits after failed requests, and gives up after `most` failures in a row."""

    def __init__(self, model: HubModel, stop: threading.Event, most: int) -> None:
        self._model = model
        self._stop = stop
        self._most = most
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def failed(self, error: Exception) -> None:
        """Return when the request should be sent again. Raises HubError, or Stopped."""
        self._failures += 1
        if self._failures > self._most or not _is_transient(error):
            raise explain(error, self._model) from None
        log.warning("%s; trying again", explain(error, self._model))
        if self._stop.wait(_wait_s(error, self._failures)):
            raise Stopped


class HubClient:
    """Asks the hub at HF_ENDPOINT about one model. The token is that of HF_TOKEN or of the file HF_TOKEN_PATH."""

    def __init__(self, model: HubModel, stop: threading.Event) -> None:
        if not constants.ENDPOINT.startswith(("https://", "http://")):
            raise HubError(f"HF_ENDPOINT is {constants.ENDPOINT!r}, which is no URL of http or https")
        self.model = model
        self.stop = stop
        self._timeout = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        # The session drops the token when it follows a redirect to another host.
        self._headers = build_hf_headers(library_name="baton", library_version=version("baton"))
        # Without compression, sizes and ranges are those of the files.
        self._headers["Accept-Encoding"] = "identity"

    def pages(self, path: str, kind: type[_T], most: int) -> list[_T]:
        """Return the pages of the hub's answer to a request to its API, at most `most`. Raises HubError.

        path: relative to that of the model.
        """
        url: str | None = f"{constants.ENDPOINT}/api/models/{self.model.repo}/{path}"
        pages: list[_T] = []
        while url is not None and len(pages) < most:
            body, url = self._body(url)
            try:
                pages.append(msgspec.json.decode(body, type=kind))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise explain(error, self.model) from None
        return pages

    def _body(self, url: str) -> tuple[bytearray, str | None]:
        """Return the body of an answer and the URL of the next page."""
        retries = Retries(self.model, self.stop, most=2)
        while True:
            try:
                with get_session().stream("GET", url, headers=self._headers, timeout=self._timeout) as response:
                    hf_raise_for_status(response)
                    body = bytearray()
                    for chunk in response.iter_bytes(_CHUNK):
                        body += chunk
                        if len(body) > _LARGEST_ANSWER:
                            raise HubError(f"{url} answers with more than {_LARGEST_ANSWER} bytes")
                    return body, _next_page(response)
            except (httpx2.HTTPError, httpx2.InvalidURL, OfflineModeIsEnabled) as error:
                retries.failed(error)

    def chunks(self, name: str, commit: str, first: int, end: int, size: int) -> Iterator[bytes]:
        """Yield the bytes `first` to `end` of a file of `size` bytes at a commit. Raises HubError, or Stopped."""
        retries = Retries(self.model, self.stop, _FAILURES_IN_A_ROW)
        while first < end:
            last = min(end, first + _LARGEST_REQUEST)
            try:
                for chunk in self._answer(name, commit, first, last, size):
                    if first + len(chunk) > size:
                        raise HubError(f"the hub sends more than the {size} bytes of {name} that it lists")
                    yield chunk[: end - first]
                    first += len(chunk)
                    retries.reset()
                    # A server that does not know ranges would send all of the file.
                    if end <= first < size:
                        return
                if first < last:
                    raise httpx2.RemoteProtocolError("the answer ends early")
            except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
                retries.failed(error)

    def _answer(self, name: str, commit: str, first: int, end: int, size: int) -> Iterator[bytes]:
        """Yield the bytes that one request brings. Raises the errors of httpx2 and huggingface_hub."""
        headers = dict(self._headers)
        if first > 0 or end < size:
            headers["Range"] = f"bytes={first}-{end - 1}"
        url = hf_hub_url(self.model.repo, name, revision=commit)
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response:
            hf_raise_for_status(response)
            # A server that does not know ranges sends the whole file.
            skip = 0 if response.status_code == http.HTTPStatus.PARTIAL_CONTENT else first
            for chunk in response.iter_bytes(_CHUNK):
                if self.stop.is_set():
                    raise Stopped
                yield chunk[skip:]
                skip = max(0, skip - len(chunk))


def _next_page(response: httpx2.Response) -> str | None:
    url = response.links.get("next", {}).get("url")
    if url is not None and not url.startswith(f"{constants.ENDPOINT}/"):
        raise HubError(f"{constants.ENDPOINT} continues its answer at another address, which would get the token")
    return url


def _is_transient(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT_STATUS
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def _wait_s(error: Exception, failures: int) -> float:
    """Return the seconds that the server asks to wait, or else 1, 2, 4 and then 8."""
    if isinstance(error, HfHubHTTPError):
        delay = error.response.headers.get("Retry-After", "")
        if delay.isdecimal() and len(delay) < 6:
            return min(float(delay), _LONGEST_WAIT_S)
    return float(min(8, 2 ** (failures - 1)))
