"""Fill a folder with a model's files, each checked by its SHA-256: download.py LIST.json FOLDER [--no-weights]."""

import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CHUNK = 4 << 20
TRIES = 5
TOKEN = os.environ.get("DOWNLOAD_TOKEN")


def fetch(url, target, sha256):
    # The header is not sent after a redirect, because the token is only for the hub itself.
    request = urllib.request.Request(url)
    if TOKEN:
        request.add_unredirected_header("Authorization", f"Bearer {TOKEN}")
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=60) as response, part.open("wb") as file:
        while chunk := response.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != sha256:
        sys.exit(f"{url}: its SHA-256 is {digest.hexdigest()}, not {sha256}")
    part.rename(target)


def main():
    files = json.loads(Path(sys.argv[1]).read_text())
    for file in files:
        target = Path(sys.argv[2], file["path"])
        # After a restart of the container, some files may already be complete.
        if target.exists() or ("--no-weights" in sys.argv and target.suffix == ".safetensors"):
            continue
        for attempt in range(TRIES):
            try:
                fetch(file["url"], target, file["sha256"])
            except OSError as error:
                if attempt == TRIES - 1 or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                    sys.exit(f"{file['url']}: {error}")
                time.sleep(2**attempt)
            else:
                print(f"{target} is there", flush=True)
                break


if __name__ == "__main__":
    main()
