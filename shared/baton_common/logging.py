"""JSON-lines logging: one object per record, extra fields at the top level. Never log a prompt, completion or key."""

import logging
import sys
from datetime import UTC, datetime

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Renders a record as one JSON object, which includes the fields given through `extra=`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "message": record.getMessage(),
        }
        entry.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def configure_logging(service: str, level: str = "info", formatter: type[JsonFormatter] = JsonFormatter) -> None:
    """Send every record of this process to stderr as JSON lines.

    service: name put into each line. level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
