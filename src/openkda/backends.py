"""Which implementation of an operator runs.

    "auto"        the fastest one that runs here
    "triton"      fused GPU kernels
    "eager"       plain tensor operations, any device
    "reference"   the definition, slow

An explicit choice runs or raises BackendUnavailable with the reason; nothing falls back silently, and `explain` tells
what "auto" stands for. No choice looks at the data.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from openkda import checks, frameworks
from openkda.errors import BackendUnavailable

NAMES = ("auto", "triton", "eager", "reference")
try:  # asked once, as a compiler cannot trace the question
    _HAS_TRITON = importlib.util.find_spec("triton") is not None
except ModuleNotFoundError:  # from a finder that keeps it out
    _HAS_TRITON = False
_OTHERWISE = 'use backend="eager", or "auto" to let openkda choose'


def why_not_triton(x: Any) -> str | None:
    """Why fused kernels cannot take tensor x; None if they can.

    A process with TRITON_INTERPRET=1 in its environment may ask for them on a CPU, to test them; "auto" does not.
    """
    fw = frameworks.of(x)
    if not fw.on_gpu(x) and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU tensor, got device {fw.device_name(x)}"
    if fw.dtype_name(x) not in ("float32", "float16", "bfloat16"):
        return f"needs float32, float16 or bfloat16, got {fw.dtype_name(x)}"
    if (capability := fw.compute_capability(x)) is not None and capability < 80:
        return f"needs compute capability 8.0 or later, got {capability // 10}.{capability % 10}"
    if not _HAS_TRITON:
        return "needs the package triton, which is not installed"
    return None


def choose(
    op: str, backend: str, available: Mapping[str, Callable[..., Any]], x: Any, *, refused: str | None = None
) -> str:
    """The backend that runs `op` on tensor x. `available` lists the implementations that exist, best first; `refused`
    says why the operator's own kernels cannot take sizes of this call.

    Raises: ValueError for an unknown backend; BackendUnavailable for one that does not exist or cannot take x.
    """
    checks.choice(op, "backend", backend, NAMES)
    if backend == "auto":
        on_gpu = frameworks.of(x).on_gpu(x)
        fused = on_gpu and refused is None and why_not_triton(x) is None
        return next(name for name in available if name != "triton" or fused)
    if backend not in available:
        raise BackendUnavailable(
            f'{op}: backend="{backend}" cannot run, as this operator has no {backend} kernel yet; {_OTHERWISE}'
        )
    if backend == "triton" and (reason := why_not_triton(x) or refused):
        raise BackendUnavailable(f'{op}: backend="triton" {reason}; {_OTHERWISE}')
    return backend


def explain(x: Any) -> str:
    """What `backend="auto"` stands for on tensor x, operator by operator, and why, as a few lines of text."""
    from openkda.conv import api as conv
    from openkda.conv import update
    from openkda.kda import chunk, recurrent
    from openkda.norm import api as norm

    fw = frameworks.of(x)
    gpu = why_not_triton(x)
    lines = [f"{fw.NAME} tensor, {fw.dtype_name(x)}, on {fw.device_name(x)}"]
    tables = (chunk.AVAILABLE, recurrent.AVAILABLE, conv.AVAILABLE, update.AVAILABLE, norm.AVAILABLE)
    for op, available in {name: row for table in tables for name, row in table.items()}.items():
        chosen = choose(op, "auto", available, x)
        lines.append(f"  {op:20s} auto -> {chosen:10s}{_why_no_kernel(available, chosen, gpu)}".rstrip())
    return "\n".join(lines)


def _why_no_kernel(available: Mapping[str, Callable[..., Any]], chosen: str, gpu: str | None) -> str:
    if "triton" not in available:
        return "it has no triton kernel yet"
    if gpu is not None:
        return f"triton {gpu}"
    return "" if chosen == "triton" else 'its triton kernels are new: they run when backend="triton" asks for them'
