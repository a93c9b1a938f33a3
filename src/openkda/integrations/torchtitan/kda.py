"""Kimi Delta Attention as torchtitan modules.

Parameters carry the names of published checkpoints, except that A_log and dt_bias sit in a module of their own.

Suffixes of tensor names: B batch, L tokens of a row, D model width, H heads, K key and value width of a head, P = H*K,
W width of the short convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.distributed.utils import is_in_batch_invariant_mode
from torchtitan.models.common import Conv1d, Linear
from torchtitan.protocols.module import Module

import openkda
from openkda.integrations.torchtitan.decode import KDACache
from openkda.kda.replay import ReplayState
from openkda.nn.blocks import BLOCK
from openkda.parallel.context import CPContext


def split_heads(x_BLP: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[B, L, H*K]` to `[B, L, H, K]`; H is counted from the tensor, because tensor parallelism may have split it."""
    with spmd.local():  # spmd_types cannot see that the heads divide evenly
        out_BLHK = x_BLP.view(*x_BLP.shape[:2], -1, head_dim)
        if spmd.is_type_checking():
            spmd.assert_type(out_BLHK, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)})
    return out_BLHK


def document_offsets(positions_BL: torch.Tensor) -> torch.Tensor:
    """Offsets of the documents in a batch folded to one row of B*L tokens.

    Args:
        positions_BL: Position of each token in its document, `[B, L]`; 0 starts a document. A row always starts one.

    Returns: cu_seqlens int32 `[N+1]`, from 0 to B*L, N documents. Reads the number of documents back from the device
        once a step, as torchtitan's own attention metadata does.
    """
    starts_BL = positions_BL == 0
    starts_BL[:, 0] = True
    end = torch.tensor([positions_BL.numel()], device=positions_BL.device)
    return torch.cat([starts_BL.flatten().nonzero().squeeze(1), end]).to(torch.int32)


class DecayParameters(Module):
    """A_log `[H]` and dt_bias `[H, K]`, alone in a module so that they can stay fp32. Holds them, computes nothing.

    FSDP casts all parameters of a unit to one dtype. In a unit of their own, with an fp32 policy, these two keep the
    precision that the exponentials of the gate need, whatever the rest of the layer is cast to (see parallelize.py).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_heads: int
        head_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(config.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads, config.head_dim, dtype=torch.float32))


class InnerKDA(Module):
    """Short convolutions and the KDA operator on local tensors; no parameters.

    This is the only place where sharded tensors become local ones, and the one to replace when a serving engine brings
    kernels with paged state: everything that carries state from token to token is in here.

    backend "chunked" trains and prefills; "recurrent" computes in fp32 token by token and has no backward.
    lower_bound None selects the softplus gate of Kimi Linear, a negative number the bounded gate of Kimi K3.
    operator_backend is handed to the operator: "auto", "triton", "eager" or "reference"; so is save_intermediates.
    batch_invariant: a sequence has the same bits in any batch and packing; with a cache the unfinished chunk is kept
    and run again at every step (`openkda.kda.replay`), so decoding has them too. That is the operator alone: for a
    whole model see KimiLinearModel. Also on in torchtitan's batch-invariant mode.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        lower_bound: float | None = None
        backend: Literal["chunked", "recurrent"] = "chunked"
        operator_backend: str = "auto"
        save_intermediates: bool = False
        batch_invariant: bool = False

        def __post_init__(self) -> None:
            if self.backend not in ("chunked", "recurrent"):
                raise ValueError(f"InnerKDA: backend must be 'chunked' or 'recurrent', got {self.backend!r}")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.lower_bound = config.lower_bound
        self.backend = config.backend
        self.operator_backend = config.operator_backend
        self.save_intermediates = config.save_intermediates
        self.batch_invariant = config.batch_invariant

    def forward(
        self,
        q_BLP: torch.Tensor,
        k_BLP: torch.Tensor,
        v_BLP: torch.Tensor,
        raw_gate_BLP: torch.Tensor,
        raw_beta_BLH: torch.Tensor,
        q_conv_P1W: torch.Tensor,
        k_conv_P1W: torch.Tensor,
        v_conv_P1W: torch.Tensor,
        A_log_H: torch.Tensor,
        dt_bias_HK: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cache: KDACache | None = None,
        cp_context: CPContext | None = None,
    ) -> torch.Tensor:
        """Return o_BLHK.

        Argument names are part of the sharding plan (sharding.py). With cu_seqlens the batch is folded to one row and
        the offsets count folded tokens; without, each row is one sequence. A cache is read and updated in place.
        With cp_context the tokens are this rank's part of rows that are spread over ranks.
        """
        if cu_seqlens is not None and cache is not None:
            raise ValueError("InnerKDA: cache must be None with cu_seqlens; decoding works on rows, not on packed rows")
        B, L, _ = q_BLP.shape
        rows = (B, L) if cu_seqlens is None and cp_context is None else (1, B * L)
        state = cache or KDACache()
        q, state.q_conv = self._conv(q_BLP.reshape(*rows, -1), q_conv_P1W, state.q_conv, cu_seqlens, cache, cp_context)
        k, state.k_conv = self._conv(k_BLP.reshape(*rows, -1), k_conv_P1W, state.k_conv, cu_seqlens, cache, cp_context)
        v, state.v_conv = self._conv(v_BLP.reshape(*rows, -1), v_conv_P1W, state.v_conv, cu_seqlens, cache, cp_context)
        operator, options = self._operator(L, cache)
        if cp_context is not None:
            options["cp_context"] = cp_context
        o, state.state = operator(
            q.unflatten(-1, (-1, self.head_dim)),
            k.unflatten(-1, (-1, self.head_dim)),
            v.unflatten(-1, (-1, self.head_dim)),
            raw_gate_BLP.reshape(*rows, -1, self.head_dim),
            raw_beta_BLH.reshape(*rows, -1),
            initial_state=state.state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=A_log_H,
            dt_bias=dt_bias_HK,
            lower_bound=self.lower_bound,
            cu_seqlens=cu_seqlens,
            backend=self.operator_backend,
            **options,
        )
        return o.reshape(B, L, *o.shape[2:])

    def _operator(self, L: int, cache: KDACache | None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The operator for L tokens a row, and its own options."""
        if self.batch_invariant or is_in_batch_invariant_mode():
            if cache is not None and (isinstance(cache.state, ReplayState) or L % BLOCK != 0):
                return openkda.recurrent_kda, {"batch_invariant": True}
            return openkda.chunk_kda, {"batch_invariant": True, "save_intermediates": self.save_intermediates}
        if self.backend == "recurrent" or (cache is not None and L == 1):
            return openkda.recurrent_kda, {}
        return openkda.chunk_kda, {"save_intermediates": self.save_intermediates}

    def _conv(
        self,
        x: torch.Tensor,
        weight_P1W: torch.Tensor,
        tail: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        cache: KDACache | None,
        cp_context: CPContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return openkda.causal_conv1d(
            x,
            weight_P1W.squeeze(1),
            activation="silu",
            initial_state=tail,
            output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
        )


class RMSNormGated(Module):
    """RMS norm over the last axis times weight times sigmoid(gate)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float = 1e-5

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.dim))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return openkda.rms_norm_gated(x, gate, self.weight, activation="sigmoid", eps=self.eps)


class KDA(Module):
    """Kimi Delta Attention: projections, the inner operator, gated norm, output projection.

    Source: the Kimi Linear report; the operator is `openkda.chunk_kda`. The Conv1d modules only hold weights
    `[P, 1, W]` as checkpoints store them; the convolution itself runs inside InnerKDA, next to its state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_heads: int
        head_dim: int
        q_proj: Linear.Config
        k_proj: Linear.Config
        v_proj: Linear.Config
        q_conv1d: Conv1d.Config
        k_conv1d: Conv1d.Config
        v_conv1d: Conv1d.Config
        f_a_proj: Linear.Config
        f_b_proj: Linear.Config
        b_proj: Linear.Config
        g_a_proj: Linear.Config
        g_b_proj: Linear.Config
        decay: DecayParameters.Config
        inner_kda: InnerKDA.Config
        o_norm: RMSNormGated.Config
        o_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = config.q_proj.build()
        self.k_proj = config.k_proj.build()
        self.v_proj = config.v_proj.build()
        self.q_conv1d = config.q_conv1d.build()
        self.k_conv1d = config.k_conv1d.build()
        self.v_conv1d = config.v_conv1d.build()
        self.f_a_proj = config.f_a_proj.build()
        self.f_b_proj = config.f_b_proj.build()
        self.b_proj = config.b_proj.build()
        self.g_a_proj = config.g_a_proj.build()
        self.g_b_proj = config.g_b_proj.build()
        self.decay = config.decay.build()
        self.inner_kda = config.inner_kda.build()
        self.o_norm = config.o_norm.build()
        self.o_proj = config.o_proj.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        documents: torch.Tensor | CPContext | None = None,
        *,
        cache: KDACache | None = None,
    ) -> torch.Tensor:
        """documents: offsets in the folded batch, or how they are spread over ranks; None: every row is one."""
        o_BLHK = self.inner_kda(
            self.q_proj(x_BLD),
            self.k_proj(x_BLD),
            self.v_proj(x_BLD),
            self.f_b_proj(self.f_a_proj(x_BLD)),
            self.b_proj(x_BLD),
            self.q_conv1d.weight,
            self.k_conv1d.weight,
            self.v_conv1d.weight,
            self.decay.A_log,
            self.decay.dt_bias,
            cu_seqlens=None if isinstance(documents, CPContext) else documents,
            cache=cache,
            cp_context=documents if isinstance(documents, CPContext) else None,
        )
        gate_BLHK = split_heads(self.g_b_proj(self.g_a_proj(x_BLD)), self.head_dim)
        return self.o_proj(self.o_norm(o_BLHK, gate_BLHK).flatten(2))
