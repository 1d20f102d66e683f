"""Certificates of pods, as files that settings name, and those of strangers."""

import os
from pathlib import Path

import trustme

from baton_common.peer_tls import PeerTls

NAME = "baton-peer"


class PeerFiles:
    """A folder as cert-manager fills one."""

    def __init__(self, folder: Path, name: str = NAME, authority: trustme.CA | None = None) -> None:
        """authority: a new one by default."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.authority = authority or trustme.CA()
        self.chain, self.key, self.roots = (folder / file for file in ("tls.crt", "tls.key", "ca.crt"))
        self.renew()

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

    def load(self) -> PeerTls:
        return PeerTls(self.chain, self.key, self.roots, self.name)

    def renew(self, authority: trustme.CA | None = None) -> None:
        """Put a new certificate and key, by another authority if so wished, in the place of those that are there."""
        self.authority = authority or self.authority
        issued = self.authority.issue_cert(self.name)
        contents = {
            self.chain: b"".join(blob.bytes() for blob in issued.cert_chain_pems),
            self.key: issued.private_key_pem.bytes(),
            self.roots: self.authority.cert_pem.bytes(),
        }
        for path, content in contents.items():
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)


def of_other_authority(folder: Path, files: PeerFiles) -> PeerTls:
    """A client that trusts these pods, but whom they do not."""
    stranger = PeerFiles(folder)
    stranger.roots.write_bytes(files.authority.cert_pem.bytes() + stranger.authority.cert_pem.bytes())
    return stranger.load()


def of_other_name(folder: Path, files: PeerFiles) -> PeerTls:
    """A client of the right authority, of another release, that nevertheless looks for a server of this one."""
    stranger = PeerFiles(folder, "other-peer", files.authority).load()
    stranger.name = files.name
    return stranger


def without_tls(folder: Path, files: PeerFiles) -> None:
    return None


STRANGERS = [of_other_authority, of_other_name, without_tls]


def write_tokens(path: Path, *tokens: str) -> Path:
    """Replace the file of the tokens as a mounted Secret is replaced, at once."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{token}\n" for token in tokens))
    os.replace(new, path)
    return path
