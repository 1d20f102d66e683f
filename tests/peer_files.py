"""Certificates of pods, as files that settings name."""

import os
from pathlib import Path

import trustme

NAME = "baton-peer"


class PeerFiles:
    """A folder as cert-manager fills one, with certificates of an authority of its own or another's."""

    def __init__(self, folder: Path, name: str = NAME, authority: trustme.CA | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = authority or trustme.CA()
        self.chain, self.key, self.roots = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.roots.write_bytes(self.authority.cert_pem.bytes())
        self.issue(name)

    @property
    def settings(self) -> dict[str, Path]:
        return {
            "peer_tls_cert_file": self.chain,
            "peer_tls_key_file": self.key,
            "peer_tls_ca_file": self.roots,
        }

    @property
    def env(self) -> dict[str, str]:
        return {f"BATON_{name.upper()}": str(path) for name, path in self.settings.items()}

    def issue(self, name: str = NAME) -> None:
        """Put a new certificate and key in the place of those that are there."""
        issued = self.authority.issue_cert(name)
        contents = b"".join(blob.bytes() for blob in issued.cert_chain_pems), issued.private_key_pem.bytes()
        for path, content in zip((self.chain, self.key), contents, strict=True):
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)

    def replace_authority(self) -> None:
        """Put another authority in the place of this one, and a certificate of its."""
        self.authority = trustme.CA()
        self.roots.write_bytes(self.authority.cert_pem.bytes())
        self.issue()
