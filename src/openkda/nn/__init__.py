"""PyTorch layers around the operators: importing this imports torch."""

from openkda.nn.attention import KimiDeltaAttention
from openkda.nn.cache import KDACache, KDALayerState
from openkda.nn.convolution import ShortConvolution
from openkda.nn.normalization import FusedRMSNormGated

__all__ = ["FusedRMSNormGated", "KDACache", "KDALayerState", "KimiDeltaAttention", "ShortConvolution"]
