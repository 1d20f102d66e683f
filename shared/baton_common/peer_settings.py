"""Settings shared by all pods that connect to other pods."""

import asyncio
from functools import cached_property
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .peer_refusals import PeerRefusals
from .peer_tls import PeerTls
from .peer_token import PeerToken

_FOLLOW_S = 5.0


class PeerSettings(BaseSettings):
    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    peer_tls_cert_file: Path | None = None
    """PEM file with the certificate and its chain that this pod shows to other pods. It turns on mutual TLS: the pod
    then accepts only TLS. Set it on all pods or on none. The file is read again when it changes."""
    peer_tls_key_file: Path | None = None
    """PEM file with the private key of the certificate."""
    peer_tls_ca_file: Path | None = None
    """PEM file with the authorities that must have signed the certificates of other pods."""
    peer_tls_name: str = Field(default="baton-peer", min_length=1)
    """DNS name that the certificates of all pods contain. Pods check it instead of their IP addresses."""

    peer_token_file: Path | None = None
    """File with secret tokens by which pods authenticate each other, one a line, each of at least 16 characters. A pod
    shows the first token and accepts all of them. Set it on all pods or on none. The file is read again when it
    changes. A token encrypts nothing."""

    @model_validator(mode="after")
    def _all_or_none(self) -> "PeerSettings":
        files = (self.peer_tls_cert_file, self.peer_tls_key_file, self.peer_tls_ca_file)
        if None in files and any(files):
            raise ValueError("peer_tls_cert_file, peer_tls_key_file and peer_tls_ca_file: give all three or none")
        return self

    @cached_property
    def peer_tls(self) -> PeerTls | None:
        """The certificate for TLS with other pods; None without TLS. Raises PeerTlsError."""
        chain, key, authority = self.peer_tls_cert_file, self.peer_tls_key_file, self.peer_tls_ca_file
        if chain is None or key is None or authority is None:
            return None
        return PeerTls(chain, key, authority, self.peer_tls_name)

    @cached_property
    def peer_token(self) -> PeerToken | None:
        """The tokens that other pods must show; None when no token is configured. Raises PeerTokenError."""
        return PeerToken(self.peer_token_file) if self.peer_token_file is not None else None

    @cached_property
    def peer_refusals(self) -> PeerRefusals:
        """The refusals on the ports of this pod."""
        return PeerRefusals()

    async def follow_peer_files(self) -> None:
        """Read the files again when they change, until cancelled.

        Each new connection reads changed files too. This loop lets a pod without new connections log the change.
        """
        while True:
            await asyncio.sleep(_FOLLOW_S)
            for files in (self.peer_tls, self.peer_token):
                if files is not None:
                    files.refresh()
