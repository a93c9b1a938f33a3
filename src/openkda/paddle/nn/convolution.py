"""The short convolution in front of q, k and v, as a Paddle layer."""

from __future__ import annotations

import math
from typing import Any

from paddle import Tensor, nn

from openkda import backends, checks
from openkda.conv import causal_conv1d


class ShortConvolution(nn.Layer):
    """`openkda.causal_conv1d` with its weight `[C, 1, W]` and bias `[C]`, uniform in +-1/sqrt(W) at first.

    Args:
        hidden_size: Channels C.
        kernel_size: Width W, at least 1; 2 to 4 are the tuned ones.
        bias: Have a bias.
        activation: "silu" or None.
        backend: As in `causal_conv1d`.
        dtype: Of the parameters, as a string; None for Paddle's default.
    Raises: ValueError for an unknown activation or backend, or a width below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        *,
        backend: str = "auto",
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        checks.choice("ShortConvolution", "activation", activation, (None, "silu"))
        checks.choice("ShortConvolution", "backend", backend, backends.NAMES)
        if kernel_size < 1:
            checks.bad_value("ShortConvolution", "kernel_size", "be at least 1", kernel_size)
        self.hidden_size, self.kernel_size = hidden_size, kernel_size
        self.activation, self.backend = activation, backend
        bound = 1 / math.sqrt(kernel_size)
        uniform = nn.initializer.Uniform(-bound, bound)
        self.weight = self.create_parameter([hidden_size, 1, kernel_size], dtype=dtype, default_initializer=uniform)
        self.bias = None
        if bias:
            self.bias = self.create_parameter([hidden_size], dtype=dtype, default_initializer=uniform)

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_context: Any | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x `[B, T, C]` -> (y `[B, T, C]`, last W-1 inputs `[N, C, W-1]` or None); see `openkda.causal_conv1d`."""
        return causal_conv1d(
            x,
            self.weight[:, 0],
            self.bias,
            activation=self.activation,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation!r}"
