"""Whose tensor is this? One small namespace per tensor library, chosen by the tensor's type.

Host code of every operator is written against the functions of such a namespace (`frameworks/torch.py` is the list) and
never imports a tensor library itself. Three rules, each with a test:

- asking never imports a library: a tensor of it exists, so it is imported already;
- a library that is not installed is never looked for;
- the answer depends on the tensor alone, per call, so torch and Paddle tensors can be used side by side in one process.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def _torch() -> ModuleType:
    from openkda.frameworks import torch

    return torch


# Import statements, not importlib, and no lru_cache: torch.compile traces through the former and stops at the latter.
SUPPORTED = {"torch": _torch}


def _of_type(kind: type) -> ModuleType | None:
    for base in kind.__mro__:
        load = SUPPORTED.get(base.__module__.split(".", 1)[0])
        if load is not None:
            return load()
    return None


def is_tensor(x: Any) -> bool:
    """True for a tensor of a supported library."""
    kind = type(x)
    return hasattr(kind, "shape") and hasattr(kind, "dtype") and _of_type(kind) is not None


def of(x: Any) -> ModuleType:
    """The namespace of the library that owns tensor x; TypeError for anything else."""
    namespace = _of_type(type(x)) if hasattr(type(x), "shape") else None
    if namespace is None:
        raise TypeError(
            f"openkda: expected a tensor of {' or '.join(SUPPORTED)}, got {type(x).__module__}.{type(x).__name__}"
        )
    return namespace
