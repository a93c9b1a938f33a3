"""PyTorch layers around the operators. A layer imports torch when its name is first used; what is shared with the
Paddle layers (`_rules`, `cache`) imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from openkda import frameworks

_HOME = {
    "FusedRMSNormGated": "openkda.nn.normalization",
    "KDACache": "openkda.nn.cache",
    "KDALayerState": "openkda.nn.cache",
    "KimiDeltaAttention": "openkda.nn.attention",
    "ShortConvolution": "openkda.nn.convolution",
}
__all__ = ["FusedRMSNormGated", "KDACache", "KDALayerState", "KimiDeltaAttention", "ShortConvolution"]

if TYPE_CHECKING:
    from openkda.nn.attention import KimiDeltaAttention as KimiDeltaAttention
    from openkda.nn.cache import KDACache as KDACache
    from openkda.nn.cache import KDALayerState as KDALayerState
    from openkda.nn.convolution import ShortConvolution as ShortConvolution
    from openkda.nn.normalization import FusedRMSNormGated as FusedRMSNormGated


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'openkda.nn' has no attribute {name!r}; it has {', '.join(_HOME)}")
    if frameworks.torch_is_paddle("openkda"):
        raise ImportError(
            f"openkda.nn.{name} is a PyTorch layer and must be imported outside of Paddle's compat scope; "
            f"for Paddle use openkda.paddle.nn.{name}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
