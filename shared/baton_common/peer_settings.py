"""Settings of all pods that speak with others."""

from functools import cached_property
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .peer_tls import PeerTls


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
