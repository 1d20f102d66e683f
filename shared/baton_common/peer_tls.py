"""Mutual TLS between pods: the certificate by which a pod is known to the others, and how it knows them."""

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
    """The files with which a pod is to speak TLS cannot be used."""


@dataclass(frozen=True, repr=False, eq=False)
class _Loaded:
    """What the files held at one time."""

    state: FileState
    chain: bytes
    key: bytes
    authority: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


class PeerTls:
    """A certificate, its key and the authority behind all peers', in files that are replaced while the pod runs.

    Pods are addressed by IP, which no certificate can know. So all of a release have one DNS name in theirs,
    and a peer, be it server or client, is who shows that name under that authority.
    """

    def __init__(self, chain: Path, key: Path, authority: Path, name: str) -> None:
        """Raises PeerTlsError when no pod could speak with another one by these files."""
        self.name = name
        self._files = chain, key, authority
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        try:
            self._loaded = self._load()
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(map(str, self._files))
            hint = f"; {_NAME_HINT.format(name=name)}" if _is_about_name(error) else ""
            raise PeerTlsError(f"cannot speak TLS with peers by {files} as {name!r}: {error}{hint}") from None
        self._seen = self._loaded.state
        self._renewals = 0

    @property
    def renewals(self) -> int:
        """How often the files have been replaced. A channel that was opened before goes on showing what they held."""
        self._latest()
        return self._renewals

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what makes a gRPC server ask clients for a certificate, by the files as they are at each handshake."""
        shown = self._latest()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            latest = self._latest()
            if latest is shown:
                return None
            shown = latest
            return _configuration(latest)

        # The types do not know None, which is: as before.
        return grpc.dynamic_ssl_server_credentials(_configuration(shown), renewed, True)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a gRPC channel shows as long as it lives; it must also look for `name`, not for the address."""
        latest = self._latest()
        return grpc.ssl_channel_credentials(latest.authority, latest.key, latest.chain)

    def server_context(self) -> ssl.SSLContext:
        """For the next connection to be accepted. Whom it is with, `check_client` tells once the hands are shaken."""
        return self._latest().server

    def client_context(self) -> ssl.SSLContext:
        """For the next connection to a peer, with `name` as server_hostname."""
        return self._latest().client

    def check_client(self, certificate: Mapping[str, object] | None) -> None:
        """Raise ssl.SSLCertVerificationError unless a client's certificate, as SSLSocket.getpeercert, is a peer's."""
        names = (certificate or {}).get("subjectAltName", ())
        if not isinstance(names, tuple) or ("DNS", self.name) not in names:
            raise ssl.SSLCertVerificationError(f"the client's certificate is not for {self.name!r}")

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        self._latest()

    def _latest(self) -> _Loaded:
        """Return what the files hold now; what cannot be used changes nothing."""
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
        """Have both shake hands: whatever is wrong with the files every peer would meet otherwise."""
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
