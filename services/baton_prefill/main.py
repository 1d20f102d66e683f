"""The prefill pod."""

from functools import partial

from baton_proto import serving_pb2 as pb
from baton_worker.server import run_worker

from .service import PrefillService
from .settings import PrefillSettings


def main(settings: PrefillSettings) -> None:
    """Serve until SIGTERM."""
    run_worker(settings, pb.ROLE_PREFILL, partial(PrefillService, settings))
