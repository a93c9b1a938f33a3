"""The short convolution in front of q, k and v, as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from openkda import backends, checks
from openkda.conv import causal_conv1d


class ShortConvolution(nn.Module):
    """`openkda.causal_conv1d` with its weight `[C, 1, W]` and bias `[C]`, stored as `nn.Conv1d` and checkpoints do.

    Args:
        hidden_size: Channels C.
        kernel_size: Width W, at least 1; 2 to 4 are the tuned ones.
        bias: Have a bias.
        activation: "silu" or None.
        backend: As in `causal_conv1d`.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.choice("ShortConvolution", "activation", activation, (None, "silu"))
        checks.choice("ShortConvolution", "backend", backend, backends.NAMES)
        if kernel_size < 1:
            checks.bad_value("ShortConvolution", "kernel_size", "be at least 1", kernel_size)
        self.hidden_size, self.kernel_size = hidden_size, kernel_size
        self.activation, self.backend = activation, backend
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(W), as `nn.Conv1d` does for one input channel a group."""
        bound = 1 / math.sqrt(self.kernel_size)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

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

    def again(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """y of `forward` from the same tensors; for `recompute`."""
        options: dict[str, Any] = {"activation": self.activation, "initial_state": state, "cu_seqlens": cu_seqlens}
        return causal_conv1d(x, weight[:, 0], bias, **options, backend=self.backend)[0]

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation!r}"
