"""The causal depthwise convolution in front of q, k and v: reference.py defines it, eager.py runs it anywhere."""

from openkda.conv.api import causal_conv1d
from openkda.conv.update import causal_conv1d_update

__all__ = ["causal_conv1d", "causal_conv1d_update"]
