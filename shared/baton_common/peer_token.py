"""The shared secret by which the pods of a release authenticate each other, with TLS or without."""

import hashlib
import hmac
import logging
import re
import threading
from pathlib import Path

from .file_state import file_state

log = logging.getLogger(__name__)

_LEAST_CHARS = 16
_MOST_CHARS = 1024
_MOST_FILE_BYTES = 16 << 10
# gRPC allows only these characters in the value of a header.
_TOKEN = re.compile(rb"[!-~]+")


class PeerTokenError(Exception):
    """The file with the tokens cannot be used. The message never quotes a token."""


class PeerToken:
    """The tokens in a file, one a line: a pod shows the first one and accepts all of them.

    A second line lets an operator replace the token while pods see the new file one after the other. The file is read
    again when it changes. When the new file cannot be used, the pod keeps the old tokens.
    """

    def __init__(self, path: Path) -> None:
        """Raises PeerTokenError."""
        self._path = path
        self._lock = threading.Lock()
        self._refused = ""  # why the file could not be used when it was last read
        try:
            self._seen = file_state(path)
            self._tokens = _read(path)
        except (OSError, PeerTokenError) as error:
            raise PeerTokenError(f"cannot use the tokens of {path}: {error}") from None

    @property
    def shown(self) -> str:
        """The token that this pod shows to others."""
        return self._latest()[0].decode()

    def accepts(self, token: str | bytes) -> bool:
        """Whether a token that another pod shows is accepted. Takes equally long for wrong and for right tokens."""
        given = _digest(token.encode() if isinstance(token, str) else token)
        matches = [hmac.compare_digest(_digest(known), given) for known in self._latest()]
        return any(matches)

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        self._latest()

    def _latest(self) -> list[bytes]:
        with self._lock:
            try:
                state = file_state(self._path)
                if state != self._seen:
                    self._seen = state
                    self._tokens = _read(self._path)
                    self._refused = ""
                    log.info("the token for peers was replaced", extra={"event": "peer_token_replaced"})
            except (OSError, PeerTokenError) as error:
                # A missing file raises the same error at each call, so log it only once.
                if str(error) != self._refused:
                    self._refused = str(error)
                    extra = {"event": "peer_token_refused"}
                    log.error("the new tokens for peers cannot be used: %s", error, extra=extra)
            return self._tokens


def _digest(token: bytes) -> bytes:
    # Digests have one length, so that comparing them does not tell how long a token is.
    return hashlib.sha256(token).digest()


def _read(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        content = file.read(_MOST_FILE_BYTES + 1)
    if len(content) > _MOST_FILE_BYTES:
        raise PeerTokenError(f"the file is larger than {_MOST_FILE_BYTES} bytes")
    tokens = [line.strip() for line in content.splitlines() if line.strip()]
    if not tokens:
        raise PeerTokenError("the file has no token")
    for number, token in enumerate(tokens, start=1):
        if not _LEAST_CHARS <= len(token) <= _MOST_CHARS:
            raise PeerTokenError(f"token {number} must have {_LEAST_CHARS} to {_MOST_CHARS} characters")
        if not _TOKEN.fullmatch(token):
            raise PeerTokenError(f"token {number} has characters other than printable ASCII without spaces")
    return tokens
