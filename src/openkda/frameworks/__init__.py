"""Whose tensor is this? One small namespace per tensor library, chosen by the tensor's type.

Host code of every operator is written against the functions of such a namespace (`frameworks/torch.py` is the list) and
never imports a tensor library itself. Three rules, each with a test:

- asking never imports a library: a tensor of it exists, so it is imported already;
- a library that is not installed is never looked for;
- the answer depends on the tensor alone, per call, so torch and Paddle tensors can be used side by side in one process.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def _torch(x: Any) -> ModuleType | None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    import openkda.frameworks.torch as namespace

    return namespace


def _paddle(x: Any) -> ModuleType | None:
    paddle = sys.modules.get("paddle")
    if paddle is None or not isinstance(x, paddle.Tensor):
        return None
    import openkda.frameworks.paddle as namespace

    return namespace


def _planned(x: Any) -> ModuleType | None:
    planned = sys.modules.get("openkda.frameworks.planned")
    return x.plan if planned is not None and isinstance(x, planned.Buffer) else None


# Paddle first: within its compat scopes the name `torch` stands for Paddle, and a Paddle tensor for one of torch's.
# Written so that torch.compile can trace the search: isinstance and an import statement; no cache, no importlib, and no
# look at the attributes of a type.
_SEARCH = {"paddle": _paddle, "torch": _torch}


def _find(x: Any) -> ModuleType | None:
    for search in _SEARCH.values():
        namespace = search(x)
        if namespace is not None:
            return namespace
    return _planned(x)


def is_tensor(x: Any) -> bool:
    """True for a tensor of a supported library."""
    return _find(x) is not None


def of(x: Any) -> ModuleType:
    """The namespace of the library that owns tensor x; TypeError for anything else."""
    namespace = _find(x)
    if namespace is None:
        raise TypeError(f"openkda: expected a tensor of {' or '.join(_SEARCH)}, got {_kind(x)}")
    return namespace


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"


def installed(name: str) -> bool:
    """Whether a library could be imported; it is not imported to find out."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it
        return False


def torch_is_paddle(module: str) -> bool:
    """Whether `import torch` within `module` would give Paddle now: `paddle.enable_compat` is on, for it or for all.

    Looks at the finder that enable_compat puts first on sys.meta_path (paddlepaddle 3.3.1, paddle/compat/proxy.py).
    """
    finders = [finder for finder in sys.meta_path if type(finder).__module__ == "paddle.compat.proxy"]
    return any(
        finder._globally_enabled or module in finder._local_enabled_scope  # type: ignore[attr-defined]
        for finder in finders
    )
