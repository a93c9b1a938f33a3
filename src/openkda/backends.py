"""Which implementation of an operator runs.

    "auto"        the fastest one that runs here
    "triton"      fused GPU kernels
    "eager"       plain tensor operations, any device
    "reference"   the definition, slow

An explicit choice runs or raises; nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openkda import checks
from openkda.errors import BackendUnavailable

NAMES = ("auto", "triton", "eager", "reference")


def choose(op: str, backend: str, available: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The implementation of `op` for `backend`; `available` lists what exists, best first.

    Raises: ValueError for an unknown backend; BackendUnavailable for one that this operator does not have.
    """
    checks.choice(op, "backend", backend, NAMES)
    if backend == "auto":
        return next(iter(available.values()))
    if backend not in available:
        raise BackendUnavailable(
            f'{op}: backend="{backend}" cannot run, as this operator has no {backend} kernel yet; '
            'use backend="eager", or "auto" to let openkda choose'
        )
    return available[backend]
