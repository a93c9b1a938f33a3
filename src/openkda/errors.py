"""The exception types of openkda beyond ValueError and TypeError."""


class BackendUnavailable(RuntimeError):
    """An explicit `backend=` cannot run here; the message says why and what would run."""
