"""Mutual TLS between pods: the certificate that a pod shows, and the check of other pods' certificates."""

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from .file_state import FileState, file_state

log = logging.getLogger(__name__)


# OpenSSL's number; Python's ssl has no name for it.
_X509_V_ERR_HOSTNAME_MISMATCH = 62
_NAME_HINT = (
    "issue the certificate for the DNS name {name!r}, or set --peer-tls-name (peerTls.name in the chart) of all pods "
    "to a DNS name that the certificate has"
)


class PeerTlsError(Exception):
    """The certificate, key or authority file cannot be used."""


@dataclass(frozen=True, repr=False, eq=False)
class _Loaded:
    """The content of the files at one time, and the TLS contexts made from it."""

    state: FileState
    chain: bytes
    key: bytes
    authority: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


class PeerTls:
    """A certificate, its key and the authority that signs all pods' certificates. The files may change at any time.

    Pods are addressed by IP, which no certificate can know. So the certificates of all pods of a release contain one
    DNS name. A server or client counts as a peer when its certificate has that name and is signed by that authority.
    """

    def __init__(self, chain: Path, key: Path, authority: Path, name: str) -> None:
        """Raises PeerTlsError when two pods that both use these files could not connect to each other."""
        self.name = name
        self._files = chain, key, authority
        self._lock = threading.Lock()  # gRPC calls `renewed` from its own threads
        try:
            self._loaded = self._load()
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(map(str, self._files))
            hint = f"; {_NAME_HINT.format(name=name)}" if _is_about_name(error) else ""
            raise PeerTlsError(f"cannot use {files} for TLS with peers as {name!r}: {error}{hint}") from None
        self._seen = self._loaded.state
        self._renewals = 0

    @property
    def renewals(self) -> int:
        """How often the files have been replaced. Channels that were opened earlier still show the old certificate."""
        self._latest()
        return self._renewals

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a gRPC server's credentials, which require client certificates. Handshakes use the current files."""
        shown = self._latest()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            latest = self._latest()
            if latest is shown:
                return None
            shown = latest
            return _configuration(latest)

        # None means that the configuration has not changed, but the type stubs do not allow it.
        return grpc.dynamic_ssl_server_credentials(_configuration(shown), renewed, True)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials that a gRPC channel keeps for its lifetime. The channel must check for `name`, not for the
        address."""
        latest = self._latest()
        return grpc.ssl_channel_credentials(latest.authority, latest.key, latest.chain)

    def server_context(self) -> ssl.SSLContext:
        """Return the context for accepting the next connection. Call `check_client` after the handshake."""
        return self._latest().server

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the next connection to a peer. Use `name` as server_hostname."""
        return self._latest().client

    def check_client(self, certificate: Mapping[str, object] | None) -> None:
        """Raise ssl.SSLCertVerificationError unless a client's certificate contains `name`.

        certificate: the return value of SSLSocket.getpeercert.
        """
        names = (certificate or {}).get("subjectAltName", ())
        if not isinstance(names, tuple) or ("DNS", self.name) not in names:
            raise ssl.SSLCertVerificationError(f"the client's certificate is not for {self.name!r}")

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        self._latest()

    def _latest(self) -> _Loaded:
        """Return the current content of the files; the last usable content when the current one cannot be used."""
        with self._lock:
            try:
                state = file_state(*self._files)
                if state != self._seen:
                    self._seen = state
                    self._loaded = self._load()
                    self._renewals += 1
                    log.info("the certificate for peers was replaced", extra={"event": "peer_certificate_replaced"})
            except (OSError, ssl.SSLError) as error:
                log.error(
                    "the new certificate for peers cannot be used: %s%s",
                    error,
                    f"; {_NAME_HINT.format(name=self.name)}" if _is_about_name(error) else "",
                    extra={"event": "peer_certificate_refused"},
                )
            return self._loaded

    def _load(self) -> _Loaded:
        while True:
            state = file_state(*self._files)
            chain, key, authority = (path.read_bytes() for path in self._files)
            server, client = (self._context(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
            self._try(server, client)
            if file_state(*self._files) == state:
                return _Loaded(state, chain, key, authority, server, client)

    def _context(self, kind: ssl._SSLMethod) -> ssl.SSLContext:
        chain, key, authority = self._files
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority)
        context.load_cert_chain(chain, key)
        return context

    def _try(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """Do a handshake in memory, so that bad files fail here and not at every connection to a peer."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(to_client, to_server, server_hostname=self.name),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for end in ends * 2:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        self.check_client(ends[1].getpeercert())


def _is_about_name(error: Exception) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == _X509_V_ERR_HOSTNAME_MISMATCH


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.authority)
