"""The gated normalisation of the operator's output, as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openkda import backends, checks
from openkda.norm import rms_norm_gated
from openkda.norm.api import ACTIVATIONS


class FusedRMSNormGated(nn.Module):
    """`openkda.rms_norm_gated` with its weight `[D]`: rmsnorm(x) * weight * act(gate).

    Args:
        hidden_size: Size D of the last axis.
        activation: "sigmoid" (Kimi Linear) or "silu"; there is no default, since libraries differ in theirs.
        eps: Added to the mean of squares.
        backend: As in `rms_norm_gated`.
    Raises: ValueError for an unknown activation or backend, or eps <= 0.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        activation: str,
        eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.choice("FusedRMSNormGated", "activation", activation, ACTIVATIONS)
        checks.choice("FusedRMSNormGated", "backend", backend, backends.NAMES)
        checks.positive("FusedRMSNormGated", "eps", eps)
        self.hidden_size, self.activation, self.eps, self.backend = hidden_size, activation, eps, backend
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate `[.., D]` -> `[.., D]` in the dtype of x; see `openkda.rms_norm_gated`."""
        return rms_norm_gated(x, gate, self.weight, activation=self.activation, eps=self.eps, backend=self.backend)

    def again(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """`forward` from the same tensors; for `recompute`."""
        return rms_norm_gated(x, gate, weight, activation=self.activation, eps=self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, activation={self.activation!r}, eps={self.eps}"
