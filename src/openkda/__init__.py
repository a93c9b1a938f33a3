"""Kimi Delta Attention (KDA) for training: one operator, its layers and its models, for PyTorch and PaddlePaddle
tensors.

Importing openkda imports no tensor library. A name below is loaded when it is first used; operators then follow the
tensors they are given. A layer has no tensor to go by: those below are of the only library that is installed, torch
where both are; or of Paddle, where openkda is imported in a compat scope that names it
(`paddle.enable_compat(scope={"openkda", "triton"})`). `openkda.nn` and `openkda.paddle.nn` leave no choice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from openkda import frameworks as _frameworks

__version__ = "0.1.0.dev0"

# Public name -> the module that defines it; None for a layer.
_HOME = {
    "chunk_kda": "openkda.kda.chunk",
    "recurrent_kda": "openkda.kda.recurrent",
    "kda_gate": "openkda.kda.gate",
    "kda_gate_cumsum": "openkda.kda.gate",
    "build_cp_context": "openkda.parallel.context",
    "explain": "openkda.backends",
    "l2norm": "openkda.norm",
    "rms_norm_gated": "openkda.norm",
    "causal_conv1d": "openkda.conv",
    "causal_conv1d_update": "openkda.conv",
    "KimiDeltaAttention": None,
    "ShortConvolution": None,
    "FusedRMSNormGated": None,
    "prepare_lens_from_mask": "openkda.packing",
    "prepare_cu_seqlens_from_mask": "openkda.packing",
    "prepare_chunk_indices": "openkda.packing",
    "tensor_cache": "openkda.packing",
    "BackendUnavailable": "openkda.errors",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from openkda.backends import explain as explain
    from openkda.conv import causal_conv1d as causal_conv1d
    from openkda.conv import causal_conv1d_update as causal_conv1d_update
    from openkda.errors import BackendUnavailable as BackendUnavailable
    from openkda.kda.chunk import chunk_kda as chunk_kda
    from openkda.kda.gate import kda_gate as kda_gate
    from openkda.kda.gate import kda_gate_cumsum as kda_gate_cumsum
    from openkda.kda.recurrent import recurrent_kda as recurrent_kda
    from openkda.nn import FusedRMSNormGated as FusedRMSNormGated
    from openkda.nn import KimiDeltaAttention as KimiDeltaAttention
    from openkda.nn import ShortConvolution as ShortConvolution
    from openkda.norm import l2norm as l2norm
    from openkda.norm import rms_norm_gated as rms_norm_gated
    from openkda.packing import prepare_chunk_indices as prepare_chunk_indices
    from openkda.packing import prepare_cu_seqlens_from_mask as prepare_cu_seqlens_from_mask
    from openkda.packing import prepare_lens_from_mask as prepare_lens_from_mask
    from openkda.packing import tensor_cache as tensor_cache
    from openkda.parallel.context import build_cp_context as build_cp_context


def _layers() -> str:
    """The module of the layers of the only library that is installed; torch's where both are, or none is."""
    only_paddle = not _frameworks.installed("torch") and _frameworks.installed("paddle")
    return "openkda.paddle.nn" if only_paddle else "openkda.nn"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'openkda' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(_HOME[name] or _layers()), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if _frameworks.torch_is_paddle("openkda"):
    # A compat scope that names openkda. All is loaded now, as nothing may be imported once the scope is over.
    _HOME = {name: home or "openkda.paddle.nn" for name, home in _HOME.items()}
    importlib.import_module("openkda.frameworks.paddle")
    for _name in _HOME:
        __getattr__(_name)
    del _name
