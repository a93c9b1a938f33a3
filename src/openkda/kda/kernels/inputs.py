"""What the user gave, as the prepare and gradient stages take it: token tensors, and the activations inside the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]: any strides, but the last axis of q, k, v
    and g is contiguous. A_log fp32 [HV], dt_bias fp32 [HV, K] or [HV*K] or None, both contiguous.

    gate: "none" (g is the log-decay in nats), "softplus" or "bounded" (g holds raw logits; lower_bound in nats).
    beta = beta_scale * sigmoid(beta) with beta_sigmoid, else beta itself (beta_scale 1).
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any | None
    dt_bias: Any | None
    scale: float
    lower_bound: float
    gate: str
    l2norm: bool
    beta_sigmoid: bool
    beta_scale: float
