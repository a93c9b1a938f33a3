"""PaddlePaddle layers around the operators, with the parameters of `openkda.nn`: importing this imports Paddle.

A linear weight is [in, out] here, and [out, in] in torch and on disk; `openkda.paddle.checkpoint` turns it.
"""

from openkda.nn.cache import KDACache, KDALayerState
from openkda.paddle.nn.attention import KimiDeltaAttention
from openkda.paddle.nn.convolution import ShortConvolution
from openkda.paddle.nn.normalization import FusedRMSNormGated

__all__ = ["FusedRMSNormGated", "KDACache", "KDALayerState", "KimiDeltaAttention", "ShortConvolution"]
