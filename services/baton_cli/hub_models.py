"""Models that the user names by folder, or by their id on a hub."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from baton_cli.errors import UserError


def local_folder(model: str, *, weights: bool) -> tuple[Path, str | None]:
    """Return a model's folder, and the name by which clients know a model of a hub. Raises UserError.

    model: a folder, or `owner/name` or `owner/name@revision` on a hub, which is downloaded into the cache of
    huggingface_hub. Whether a folder is a model is not checked.
    """
    from baton_hub.model_id import hub_model

    found = hub_model(model)
    if found is None:
        return Path(model), None
    return pull_model(model, weights=weights), found.repo


def pull_model(model: str, *, weights: bool, cache: Path | None = None, volume_size: int | None = None) -> Path:
    """Download what Baton reads of a model on a hub, and return its folder. Raises UserError."""
    # Importing the client of the hub takes a third of a second.
    from baton_cli.pull_progress import pull_progress
    from baton_hub.errors import HubError
    from baton_hub.model_id import HubModel
    from baton_hub.pull import pull

    try:
        parsed = HubModel.parse(model)
        with interruptible(), pull_progress(str(parsed)) as progress:
            pulled = pull(parsed, progress, root=cache, weights=weights, volume_size=volume_size)
            progress.say(f"{parsed.repo} at commit {pulled.commit} is in {pulled.folder}")
    except (ValueError, HubError) as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        raise UserError("the download was interrupted; the same command resumes it") from None
    return pulled.folder


@contextmanager
def interruptible() -> Iterator[None]:
    """End the work at SIGTERM as at Ctrl-C. The first process of a container would ignore the signal otherwise."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
