"""Kimi Linear for torchtitan 0.3.0: `--module openkda.integrations.torchtitan --config NAME`.

    model.py               the decoder: its blocks and experts
    kda.py  mla.py         the two kinds of attention
    builders.py            configs of those modules from a handful of sizes
    config_registry.py     the named training configurations
    decode.py              caches and token-by-token generation
    sharding.py            where every parameter and activation lives on a device mesh
    parallelize.py         applies the plan, activation checkpointing and FSDP
    context_parallel.py    rows that are spread over ranks; pipeline.py: layers that are
    state_dict_adapter.py  names on disk <-> names here
    data.py                packed documents; documents.py reads the text, tokenizer.py turns it into tokens
    cpu.py                 what torch 2.13 on a CPU needs

torchtitan's interfaces move between releases, so everything that touches them is in this folder and holds for one
release. No mathematics here: modules call `openkda`'s operators.

Names are resolved on first use: importing `cpu` must not pull in the model.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TORCHTITAN_VERSION = "0.3.0"

_HOME = {
    "KDA": "kda",
    "InnerKDA": "kda",
    "MLA": "mla",
    "KimiLinearBlock": "model",
    "KimiLinearModel": "model",
    "KimiLinearStateDictAdapter": "state_dict_adapter",
    "model_registry": "builders",
    "parallelize_kimi_linear": "parallelize",
}

__all__ = ["TORCHTITAN_VERSION", "require_torchtitan", *sorted(_HOME)]  # pyright: ignore[reportUnsupportedDunderAll]


def require_torchtitan() -> None:
    """Raise ImportError unless the installed torchtitan is the release this folder is written for."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = "no torchtitan"
    if found.split("+")[0] != TORCHTITAN_VERSION:
        raise ImportError(
            f"openkda.integrations.torchtitan: torchtitan must be {TORCHTITAN_VERSION}, got {found}; "
            "install the extra: pip install 'openkda[torchtitan]'"
        )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
