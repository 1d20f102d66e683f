"""The fingerprint of an engine. Engines may decode on each other's KV only if their fingerprints are equal."""

import hashlib
import json
from pathlib import Path

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def layout_fingerprint(layout: dict[str, object], folder: Path) -> str:
    """Return a digest of the KV layout and of the weights in a model folder.

    Models whose weights differ only in values would decode each other's KV into garbage, so the digest covers samples
    of each file; reading whole files would take minutes.
    """
    digest = hashlib.blake2b(json.dumps(layout, sort_keys=True).encode(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
