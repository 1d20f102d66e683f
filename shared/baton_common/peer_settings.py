"""Settings of all pods that speak with others."""

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
    """PEM file with the certificate, and its chain, that this pod shows to other pods, to speak TLS with them and with
    nobody else; read again when it changes. All pods that are to speak with each other need one."""
    peer_tls_key_file: Path | None = None
    """PEM file with its private key."""
    peer_tls_ca_file: Path | None = None
    """PEM file with the authorities whose certificates other pods must show."""
    peer_tls_name: str = Field(default="baton-peer", min_length=1)
    """DNS name that the certificates of all these pods have, in place of the addresses where they are reached."""

    peer_token_file: Path | None = None
    """File with secret tokens by which pods recognise each other, one a line, each of at least 16 characters. A pod
    shows the first one and accepts all of them. The file is read again when it changes. All pods that are to speak with
    each other need one. It encrypts nothing."""

    @model_validator(mode="after")
    def _all_or_none(self) -> "PeerSettings":
        files = (self.peer_tls_cert_file, self.peer_tls_key_file, self.peer_tls_ca_file)
        if None in files and any(files):
            raise ValueError("peer_tls_cert_file, peer_tls_key_file and peer_tls_ca_file: give all three or none")
        return self

    @cached_property
    def peer_tls(self) -> PeerTls | None:
        """How to speak TLS with other pods; None where there is none of it. Raises PeerTlsError."""
        chain, key, authority = self.peer_tls_cert_file, self.peer_tls_key_file, self.peer_tls_ca_file
        if chain is None or key is None or authority is None:
            return None
        return PeerTls(chain, key, authority, self.peer_tls_name)

    @cached_property
    def peer_token(self) -> PeerToken | None:
        """The token that other pods must show; None where nobody must. Raises PeerTokenError."""
        return PeerToken(self.peer_token_file) if self.peer_token_file is not None else None

    @cached_property
    def peer_refusals(self) -> PeerRefusals:
        """Counts who was refused on the ports of this pod."""
        return PeerRefusals()

    async def follow_peer_files(self) -> None:
        """Read the files again when they change, until cancelled.

        Connections do so by themselves, but a pod that makes none must log as well that its files were replaced.
        """
        while True:
            await asyncio.sleep(_FOLLOW_S)
            for files in (self.peer_tls, self.peer_token):
                if files is not None:
                    files.refresh()
