"""transformers' Kimi Linear, and the linear attention of its glm5_next, on openkda's operators.

    from openkda.integrations import transformers as openkda_transformers
    openkda_transformers.enable()        # until disable(); or: with openkda_transformers.enabled(): ...

What changes is the `forward` of a few classes of transformers, so models that exist already change with it, and
parameters, checkpoints and caches stay transformers' own:

    KimiLinearDeltaAttention, Glm5NextTextLinearAttention      convolution, gate, beta, l2norm and KDA are openkda's
    KimiLinearRMSNormGated, Glm5NextTextRMSNormGated           `openkda.rms_norm_gated`
    KimiLinearModel, Glm5NextTextModel                         packed sequences reach the layers, see `packed`

A model whose modules got a `forward` of their own (accelerate's dispatch, transformers' `kernelize`) before `enable()`
keeps calling what it had then: enable first.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: The release whose classes `enable` knows. They change from one to the next, so it is exact.
VERSION = "5.24.0"

_Attribute = tuple[type, str]
_originals: dict[_Attribute, Any] = {}
_ours: dict[_Attribute, Callable[..., Any]] = {}


def enable() -> None:
    """Make transformers run KDA through openkda, in this process, until `disable`. A second call changes nothing.

    Raises: ImportError when transformers is not installed or is another release than `VERSION`.
    """
    if _originals:
        return
    _check_version()
    from openkda.integrations.transformers import forwards

    _ours.update(forwards.replacements())
    for (owner, name), forward in _ours.items():
        _originals[owner, name] = owner.__dict__[name]
        setattr(owner, name, forward)


def disable() -> None:
    """Put back what `enable` replaced: the very same objects. Without `enable` it changes nothing.

    Raises: RuntimeError, before anything is changed, if somebody else has since replaced one of them: what stands there
        now may call openkda, and is not ours to remove.
    """
    for (owner, name), forward in _ours.items():
        if owner.__dict__.get(name) is not forward:
            raise RuntimeError(
                f"disable: {owner.__name__}.{name} must be what enable() put there, got another function; "
                "undo the later replacement first"
            )
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    _ours.clear()


def is_enabled() -> bool:
    """Whether transformers runs through openkda now."""
    return bool(_originals)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` for the duration of a block; what was enabled before stays so after it."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def _check_version() -> None:
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ImportError(
            f"openkda.integrations.transformers: transformers must be {VERSION}, got {found}; "
            "pip install 'openkda[transformers]' has the one that fits"
        )
