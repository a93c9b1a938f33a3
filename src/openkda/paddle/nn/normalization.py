"""The gated normalisation of the operator's output, as a Paddle layer."""

from __future__ import annotations

from paddle import Tensor, nn

from openkda import backends, checks
from openkda.norm import rms_norm_gated
from openkda.norm.api import ACTIVATIONS


class FusedRMSNormGated(nn.Layer):
    """`openkda.rms_norm_gated` with its weight `[D]`, ones at first: rmsnorm(x) * weight * act(gate).

    Args:
        hidden_size: Size D of the last axis.
        activation: "sigmoid" (Kimi Linear) or "silu"; there is no default, since libraries differ in theirs.
        eps: Added to the mean of squares.
        backend: As in `rms_norm_gated`.
        dtype: Of the weight, as a string; None for Paddle's default.
    Raises: ValueError for an unknown activation or backend, or eps <= 0.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        activation: str,
        eps: float = 1e-5,
        backend: str = "auto",
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        checks.choice("FusedRMSNormGated", "activation", activation, ACTIVATIONS)
        checks.choice("FusedRMSNormGated", "backend", backend, backends.NAMES)
        checks.positive("FusedRMSNormGated", "eps", eps)
        self.hidden_size, self.activation, self.eps, self.backend = hidden_size, activation, eps, backend
        self.weight = self.create_parameter(
            [hidden_size], dtype=dtype, default_initializer=nn.initializer.Constant(1.0)
        )

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate `[.., D]` -> `[.., D]` in the dtype of x; see `openkda.rms_norm_gated`."""
        return rms_norm_gated(x, gate, self.weight, activation=self.activation, eps=self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, activation={self.activation!r}, eps={self.eps}"
