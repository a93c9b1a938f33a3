"""PyTorch layers with the signatures and parameters of fla 0.6.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openkda import checks
from openkda.integrations.fla import modules


class ShortConvolution(nn.Conv1d):
    """fla's short convolution, weight `[C, 1, W]`, on `openkda.causal_conv1d`.

    backend "triton" and "cuda" are both accepted: openkda chooses by the device.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        self_activation = modules.check_convolution(activation, backend, kwargs)
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation, self.backend = hidden_size, self_activation, backend

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
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
        """x `[B, T, C]` -> (y `[B, T, C]`, last W inputs `[N, C, W]` or None).

        Args:
            residual: Added to y.
            mask: `[B, T]`, not 0 where a token is; x is not edited.
            cache: `[N, C, W]`; edited in place by a call without gradients that has one token per sequence.
            chunk_indices: Not needed. kwargs: cp_context; cu_seqlens_cpu, not needed.
        """
        cp_context = kwargs.pop("cp_context", None)
        kwargs.pop("cu_seqlens_cpu", None)
        modules.refuse("ShortConvolution", kwargs)
        in_place = cache is not None and not torch.is_grad_enabled() and modules.one_token_each(x, cu_seqlens)
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
        if in_place and cache is not None and state is not None:
            state = cache.copy_(state)
        return y, state if output_final_state else None

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token per sequence; cache is edited in place. Without gradients."""
        with torch.no_grad():
            return self(x, residual, None, cache, output_final_state, cu_seqlens)

    @property
    def state_size(self) -> int:
        """Entries of the cache of one sequence."""
        return self.hidden_size * self.kernel_size[0]


class FusedRMSNormGated(nn.Module):
    """fla's gated normalisation, weight `[D]` or None, on `openkda.rms_norm_gated`. fla's default gate is "swish"."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.choice("FusedRMSNormGated", "activation", activation, tuple(modules.ACTIVATIONS))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = torch.empty(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
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

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}, "
            f"activation={self.activation}"
        )
