"""Round where transformers rounds: what is left of a bf16 comparison then is the order of sums.

In bf16 transformers and ours compute the same formulas and round to 16 bits at different places. These three, and no
others, are the difference (transformers 5.24, `modeling_kimi_linear.py` and `integrations/moe.py`):

    short convolution   transformers rounds its sum before silu; ours rounds once, after silu
    beta                transformers rounds sigmoid(beta); ours keeps it in fp32 inside the operator
    routed experts      transformers sums a token's experts in fp32, rounds once; torchtitan rounds every term and sum

`follow_reference` makes one model of ours round like transformers. It is for comparisons only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalDispatchMetadata

import openkda
from openkda.integrations.torchtitan.kda import InnerKDA
from openkda.integrations.torchtitan.model import KimiLinearModel
from openkda.nn import KDACache

NOTE = (
    "Ours rounds where transformers does: the convolution before silu, sigmoid(beta), and once for a token's experts."
)


def follow_reference(model: KimiLinearModel) -> None:
    """Change the rounding of every KDA layer and of the sum of experts, in place; weights stay as they are."""
    for module in list(model.modules()):
        if isinstance(module, InnerKDA):
            module._conv = _convolution  # type: ignore[method-assign]
            module.register_forward_pre_hook(_round_beta)
        elif isinstance(module, RoutedExperts):
            module.token_dispatcher.combine = _sum_of_experts  # type: ignore[method-assign]


def _convolution(
    x: Tensor, weight_P1W: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, cache: KDACache | None, _: None
) -> tuple[Tensor, Tensor | None]:
    """`InnerKDA._conv` on one process (its last argument is the context of several)."""
    y, tail = openkda.causal_conv1d(
        x,
        weight_P1W.squeeze(1),
        initial_state=tail,
        output_final_state=cache is not None,
        cu_seqlens=cu_seqlens,
    )
    return F.silu(y), tail


RAW_BETA = 4  # which argument of InnerKDA.forward


def _round_beta(_: InnerKDA, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Logits, in fp32, whose sigmoid is the rounded sigmoid of the logits that came."""
    rounded = torch.sigmoid(args[RAW_BETA])
    return (*args[:RAW_BETA], torch.logit(rounded.double()).float(), *args[RAW_BETA + 1 :])


def _sum_of_experts(routed_output_RD: Tensor, metadata: LocalDispatchMetadata, x_TD: Tensor) -> Tensor:
    weighted_RD = routed_output_RD.float() * metadata.topk_scores_experts_sorted_N.reshape(-1, 1)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    return out_TD.index_add(0, metadata.token_indices_experts_sorted_N, weighted_RD).to(x_TD.dtype)
