"""The files of a repository at one commit, as the hub lists them, with their sizes and hashes.

Only the root and the folder of chat templates have files that Baton reads.
"""

import hashlib
import re
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import msgspec
from huggingface_hub import constants

from .client import HubClient
from .errors import HubError
from .model_id import is_commit

if TYPE_CHECKING:
    from hashlib import _Hash

# The folder of the templates that have a name.
TEMPLATES = "additional_chat_templates"
# A plain name at the root or in the folder of templates. Baton reads no file with another name.
_NAME = rf"\A(?:{TEMPLATES}/)?[A-Za-z0-9_][A-Za-z0-9._+-]{{0,254}}\Z"
_MOST_PAGES = 20  # of 1,000 entries

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Sha1 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _Lfs(msgspec.Struct):
    """oid: the SHA-256 of the content."""

    oid: _Sha256
    size: _Size


class _Entry(msgspec.Struct):
    """A file or folder in an answer of the API. oid: the id of its Git object."""

    path: str
    oid: _Sha1
    type: str
    size: _Size = 0
    lfs: _Lfs | None = None


class _Revision(msgspec.Struct):
    sha: str


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository. name: relative to its root.

    hash: for a file in Git LFS the SHA-256 of the content, otherwise the id of the Git blob. Both are hexadecimal, and
    the file has this name in the cache.
    """

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    size: _Size
    hash: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|[0-9a-f]{64})\Z")]

    def hasher(self) -> "_Hash":
        """Return what computes `hash` from the content."""
        if len(self.hash) == 64:
            return hashlib.sha256()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Listing(msgspec.Struct, frozen=True):
    """The files of a repository at a commit, by name."""

    commit: str
    files: dict[str, RemoteFile]

    def pick(self, names: list[str]) -> list[RemoteFile]:
        return [self.files[name] for name in names]


def fetch_listing(client: HubClient) -> Listing:
    """Ask the hub for the commit of a revision and for its files. Raises HubError."""
    revision = client.model.revision
    commit = revision if client.model.pinned else _commit(client, revision)
    entries = _entries(client, f"tree/{commit}")
    if any(entry.type == "directory" and entry.path == TEMPLATES for entry in entries):
        entries += _entries(client, f"tree/{commit}/{TEMPLATES}")
    files = [entry for entry in entries if entry.type == "file" and re.search(_NAME, entry.path)]
    return Listing(commit, {entry.path: _remote(entry) for entry in files})


def _entries(client: HubClient, path: str) -> list[_Entry]:
    return [entry for page in client.pages(path, list[_Entry], _MOST_PAGES) for entry in page]


def _commit(client: HubClient, revision: str) -> str:
    commit = client.pages(f"revision/{quote(revision, safe='')}?expand=sha", _Revision, 1)[0].sha
    if not is_commit(commit):
        raise HubError(f"{constants.ENDPOINT} names the commit {commit[:64]!r} for {client.model}")
    return commit


def _remote(entry: _Entry) -> RemoteFile:
    if entry.lfs is not None:
        return RemoteFile(entry.path, entry.lfs.size, entry.lfs.oid)
    return RemoteFile(entry.path, entry.size, entry.oid)
