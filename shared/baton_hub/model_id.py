"""The id of a model on a hub: `owner/name`, or `owner/name@revision`."""

import re
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
# The names of branches and tags become file names below the cache's folder of references.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,254}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class HubModel:
    """A model on a hub. repo: `owner/name`. revision: a branch, a tag or a commit, which is 40 hexadecimal digits."""

    repo: str
    revision: str = _DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, so that its files never change."""
        return is_commit(self.revision)

    @classmethod
    def parse(cls, text: str) -> "HubModel":
        """Raises ValueError, whose message is for the user."""
        repo, at, revision = text.partition("@")
        unsafe = "--" in repo or ".." in repo or repo.endswith(".git")
        if len(repo) > 96 or unsafe or not _REPO.fullmatch(repo):
            raise ValueError(f"{repo!r} is not the id of a model on a hub, which has the form owner/name")
        if at and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
            raise ValueError(f"{revision!r} is not a revision, which is a branch, a tag or a commit")
        return cls(repo, revision or _DEFAULT_REVISION)


def is_commit(text: object) -> bool:
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def hub_model(text: str) -> HubModel | None:
    """Return the model on a hub that a user means; None if the text names an existing folder or cannot be an id.

    A folder takes precedence over an id. A path that could be an id should be written as `./owner/name`.
    """
    if Path(text).exists():
        return None
    try:
        return HubModel.parse(text)
    except ValueError:
        return None
