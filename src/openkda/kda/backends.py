"""Which implementation runs a call: "triton" (fused kernels), "eager" (chunked matmuls) or "reference" (token by token).

"auto" never falls to a slow path in silence: `explain` tells what it chooses for a tensor and why. A named backend that cannot run
raises BackendUnavailable with the reason. No choice looks at the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openkda import checks, frameworks
from openkda.errors import BackendUnavailable

BACKENDS = ("auto", "triton", "eager", "reference")


def why_not_triton(x: Any) -> str | None:
    """The reason why the fused kernels cannot take tensor x, or None if they can."""
    fw = frameworks.of(x)
    if not fw.on_gpu(x):
        return f'the fused kernels need a GPU tensor, got device {fw.device_name(x)}; use backend="eager", or "auto" to let openkda choose'
    return 'the fused kernels are not part of this version; use backend="eager", or "auto" to let openkda choose'


def choose(op: str, backend: str, x: Any) -> str:
    """The backend that runs `op` on tensor x: `backend` itself, or what "auto" stands for."""
    checks.choice(op, "backend", backend, BACKENDS)
    if backend == "auto":
        return "eager" if why_not_triton(x) else "triton"
    if backend == "triton" and (reason := why_not_triton(x)):
        raise BackendUnavailable(f'{op}: backend="triton" cannot run: {reason}')
    return backend


def chunk(op: str, backend: str, q: Any, *, save_intermediates: bool, batch_invariant: bool, cp_context: Any | None) -> Callable[..., Any]:
    """The function that runs chunk_kda on checked arguments."""
    chosen = choose(op, backend, q)
    if cp_context is not None:
        checks.bad_value(op, "cp_context", "be None", type(cp_context).__name__, f'backend "{chosen}" runs on one rank')
    if batch_invariant and chosen == "eager":
        raise BackendUnavailable(
            f"{op}: batch_invariant=True cannot be promised by backend \"eager\", whose matmuls may sum in an order that depends on the batch;"
            ' backend="reference" does each sequence alone'
        )
    if chosen == "reference":
        from openkda.kda.reference import chunk_kda
    else:
        from openkda.kda.eager import chunk_kda
    return chunk_kda


def explain(x: Any) -> str:
    """What `backend="auto"` chooses for operators on tensor x, and why, in a few lines of text."""
    fw = frameworks.of(x)
    reason = why_not_triton(x)
    chosen = choose("explain", "auto", x)
    lines = [f"{fw.NAME} tensor, {fw.dtype_name(x)}, on {fw.device_name(x)}: backend auto -> {chosen}"]
    lines.append(f"  triton     {'runs here' if reason is None else 'cannot run: ' + reason}")
    lines.append("  eager      runs anywhere: chunks of 64 tokens, matmuls of the tensor library")
    lines.append("  reference  runs anywhere: token by token, slow, the definition")
    return "\n".join(lines)
