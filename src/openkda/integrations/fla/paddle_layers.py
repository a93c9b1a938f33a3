"""Paddle layers with the signatures of fla 0.6.0, less `device`, which Paddle sets globally."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor, nn

from openkda import checks
from openkda.integrations.fla import modules
from openkda.paddle import nn as ours


class ShortConvolution(ours.ShortConvolution):
    """fla's short convolution, weight `[C, 1, W]`, on `openkda.causal_conv1d`; see `layers.ShortConvolution`."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        activation = modules.check_convolution(activation, backend, kwargs)
        super().__init__(hidden_size, kernel_size, bias, activation, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """x `[B, T, C]` -> (y `[B, T, C]`, last W inputs `[N, C, W]` or None); cache `[N, C, W]` is edited in place by
        a call without gradients that has one token per sequence.
        """
        cp_context = kwargs.pop("cp_context", None)
        kwargs.pop("cu_seqlens_cpu", None)
        modules.refuse("ShortConvolution", kwargs)
        in_place = cache is not None and not paddle.is_grad_enabled() and modules.one_token_each(x, cu_seqlens)
        y, state = modules.short_convolution(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            residual=residual,
            mask=mask,
            cache=cache,
            want_state=output_final_state or in_place,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
        )
        if in_place:
            state = paddle.assign(state, cache)
        return y, state if output_final_state else None

    @property
    def state_size(self) -> int:
        """Entries of the cache of one sequence."""
        return self.hidden_size * self.kernel_size


class FusedRMSNormGated(nn.Layer):
    """fla's gated normalisation, weight `[D]` or None, on `openkda.rms_norm_gated`. fla's default gate is "swish"."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        checks.choice("FusedRMSNormGated", "activation", activation, tuple(modules.ACTIVATIONS))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        self.weight = None
        if elementwise_affine:
            ones = nn.initializer.Constant(1.0)
            self.weight = self.create_parameter([hidden_size], dtype=dtype, default_initializer=ones)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """x, g `[.., D]` -> `[.., D]`; with prenorm (that, x + residual)."""
        return modules.rms_norm_gated(
            x,
            g,
            self.weight,
            activation=self.activation,
            eps=self.eps,
            residual=residual,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )
