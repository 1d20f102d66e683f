"""What can go wrong between processes that divide a model."""


class CollectiveError(RuntimeError):
    """Another rank is gone, or cannot be reached."""
