"""Keeps converted tokenizers between starts, below the user's cache folder ($XDG_CACHE_HOME, or ~/.cache).

Model folders are often read-only, or shared by many pods, so nothing is written there. The name of an entry is the hash
of all that its content follows from, so an entry is never out of date, and those who make the same one at the same time
write the same.
"""

import hashlib
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32


def cache_folder() -> Path | None:
    """Return the folder of the cache; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "tokenizers"
    except RuntimeError:
        return None


def read_entry(name: str) -> bytes | None:
    """Return the content of an entry; None when it is not there, or damaged."""
    folder = cache_folder()
    try:
        data = b"" if folder is None else (folder / name).read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def write_entry(name: str, data: bytes) -> None:
    """Write an entry as a whole, or log why that is not possible: the next start then converts the tokenizer again."""
    folder = cache_folder()
    if folder is None:
        return
    part = folder / f".{name}.{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with part.open("xb") as file:
                file.write(hashlib.sha256(data).digest() + data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(folder / name)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        log.info("the converted tokenizer cannot be kept in %s: %s", folder, error.strerror)
