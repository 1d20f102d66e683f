"""The decode pod."""

from functools import partial

from baton_proto import serving_pb2 as pb
from baton_worker.server import run_worker

from .service import DecodeService
from .settings import DecodeSettings


def main(settings: DecodeSettings) -> None:
    """Serve until SIGTERM."""
    run_worker(settings, pb.ROLE_DECODE, partial(DecodeService, settings))
