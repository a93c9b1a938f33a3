"""Is this the same model? Compare a Kimi Linear of transformers with ours, and say where the two first differ.

    pair.py        both models with the same weights, and what they read; reference.py and prompts.py make the parts
    rounding.py    ours, made to round to bf16 where transformers does
    record.py      intermediate values of a forward, under names that both sides share (stages.py)
    metrics.py     figures of two sets of logits, in fp64
    comparison.py  runs both models and gathers everything in a Comparison (results.py)
    causes.py      tries explanations of the first difference
    page.py        a Comparison as a page; figure.py draws its plot

`openkda parity` is this package on the command line, and docs/parity.md tells how to read what it prints. In Python:

    from openkda.parity import compare, load
    pair = load("tiny")
    print(compare(pair).text())

Needs the extras transformers and torchtitan. Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Comparison": "results",
    "Pair": "pair",
    "Prompt": "prompts",
    "Thresholds": "metrics",
    "compare": "comparison",
    "load": "pair",
    "write_page": "page",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
