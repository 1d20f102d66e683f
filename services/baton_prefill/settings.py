"""Settings of a prefill pod."""

from baton_worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Those of every worker."""
