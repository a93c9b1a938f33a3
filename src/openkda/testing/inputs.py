"""Inputs for judging a KDA operator, drawn in fp64 from one seed and rounded once to the dtype under test.

Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], log-decay in nats or raw gate logits; beta [B, T, HV];
A_log [HV]; dt_bias [HV, K]; initial_state [N, HV, K, V], N the number of sequences: B, or the slots of cu_seqlens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

#: Tokens of one chunk; the interesting lengths and offsets lie around its multiples.
CHUNK = 64


@dataclass(frozen=True)
class KDAInputs:
    """One call of `chunk_kda`, with the gradients to feed into its backward pass.

    Attributes:
        q, k, v, g, beta: The positional arguments.
        initial_state: fp32 (fp64 for fp64 inputs) or None.
        A_log, dt_bias: Gate parameters, fp32 (fp64 for fp64 inputs); None for a gate that is given as log-decay.
        cu_seqlens: Packed offsets or None.
        options: Further keyword arguments, as `chunk_kda` takes them.
        grad_o, grad_final_state: Gradients of the loss with respect to the two results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    options: dict[str, Any]
    grad_o: Tensor
    grad_final_state: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The differentiable arguments that are present, by name."""
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def num_tokens(self) -> int:
        """Tokens along T that belong to a sequence; what lies beyond is the tail."""
        return self.q.shape[1] if self.cu_seqlens is None else int(self.cu_seqlens[-1])

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of `chunk_kda`."""
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `chunk_kda`; what is None is left out."""
        named = {n: getattr(self, n) for n in ("initial_state", "A_log", "dt_bias", "cu_seqlens")}
        return {n: t for n, t in named.items() if t is not None} | {"output_final_state": True} | self.options

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> KDAInputs:
        """The same numbers in another dtype: an exact copy when dtype is wider.

        State, its gradient, gate parameters and a log-decay gate are never rounded to 16 bits: they become fp32 there.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        narrow = {"q", "k", "v", "beta", "grad_o"} | ({"g"} if self.options.get("use_gate_in_kernel") else set())
        fields = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                fields[name] = value.to(device=device)
                if value.is_floating_point():
                    fields[name] = fields[name].to(dtype if name in narrow else wide)
        return replace(self, **fields)


# ---- gates: (generator, shape [B, T, HV, K]) -> Gate
@dataclass(frozen=True)
class Gate:
    """Gate values and the parameters that go with them: see `KDAInputs`."""

    g: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _normal(rng: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _uniform(rng: Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=rng, dtype=torch.float64)


def _softplus(rng: Generator, shape: tuple[int, ...]) -> Gate:
    heads, channels = shape[2:]
    return Gate(
        _normal(rng, *shape),
        0.5 * _normal(rng, heads),
        0.3 * _normal(rng, heads, channels),
        {"use_gate_in_kernel": True},
    )


def _bounded(rng: Generator, shape: tuple[int, ...]) -> Gate:
    gate = _softplus(rng, shape)
    return replace(gate, options={"use_gate_in_kernel": True, "lower_bound": -5.0})


def _softplus_strong(rng: Generator, shape: tuple[int, ...]) -> Gate:
    # exp(A_log) is about 1000, logits reach from -12 to 12: decays from 1e-3 to 1e4 nats side by side.
    logits = 24.0 * _uniform(rng, *shape) - 12.0
    return replace(_softplus(rng, shape), g=logits, A_log=math.log(1000.0) + 0.1 * _normal(rng, shape[2]))


def _bounded_strong(rng: Generator, shape: tuple[int, ...]) -> Gate:
    # lower_bound -1000 with saturated logits: about half of the decays are near 0 nats, half near -1000.
    logits = torch.where(_uniform(rng, *shape) < 0.5, -8.0, 8.0) + _normal(rng, *shape)
    options = {"use_gate_in_kernel": True, "lower_bound": -1000.0}
    return replace(_softplus(rng, shape), g=logits, options=options)


def _layer_init(rng: Generator, shape: tuple[int, ...]) -> Gate:
    # A fresh layer: A_log = log U(1, 16); softplus(dt_bias) log-uniform in [1e-3, 0.1]; logits of a fresh projection.
    heads, channels = shape[2:]
    dt = torch.exp(math.log(1e-3) + math.log(100.0) * _uniform(rng, heads, channels))
    dt_bias = dt + torch.log(-torch.expm1(-dt))  # inverse of softplus
    return Gate(
        0.05 * _normal(rng, *shape), torch.log(1 + 15 * _uniform(rng, heads)), dt_bias, {"use_gate_in_kernel": True}
    )


def _constant(value: float) -> Callable[[Generator, tuple[int, ...]], Gate]:
    return lambda rng, shape: Gate(torch.full(shape, value, dtype=torch.float64))


def _beside(rng: Generator, shape: tuple[int, ...]) -> Gate:
    return Gate(torch.where(_uniform(rng, *shape) < 0.1, -1000.0, -0.01).double())


def _log_uniform(rng: Generator, shape: tuple[int, ...]) -> Gate:
    return Gate(-torch.exp(math.log(1e-4) + math.log(1e7) * _uniform(rng, *shape)))


def _given(rng: Generator, shape: tuple[int, ...]) -> Gate:
    return Gate(-torch.nn.functional.softplus(_normal(rng, *shape)))


#: Every gate that make_inputs knows. The first five are logits, so that A_log and dt_bias get gradients; the others are
#: log-decay in nats.
GATES: dict[str, Callable[[Generator, tuple[int, ...]], Gate]] = {
    "softplus": _softplus,  # Kimi Linear's family, ordinary strength
    "bounded": _bounded,  # Kimi K3's family, lower_bound -5
    "softplus_strong": _softplus_strong,  # 1e-3 to 1e4 nats
    "bounded_strong": _bounded_strong,  # lower_bound -1000, saturated at both ends
    "layer_init": _layer_init,  # what a new layer starts from
    "given": _given,  # ordinary strength, as log-decay
    "none": _constant(0.0),  # no decay: the plain delta rule
    "slow": _constant(-1e-4),  # decay that 16 bits cannot store: exp(-1e-4) rounds to 1 in bf16
    "strong": _constant(-1000.0),  # every step forgets everything
    "beside": _beside,  # -1000 beside -0.01 in one chunk
    "log_uniform": _log_uniform,  # 1e-4 to 1000 nats, any channel, any token
}


# ---- keys, offsets, layouts
def unit(x: Tensor) -> Tensor:
    """x scaled to norm 1 along the last axis."""
    return x / x.square().sum(-1, keepdim=True).sqrt()


def packed_offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Offsets [0, l0, l0 + l1, ...], int32, of sequences with these lengths in tokens."""
    return torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0).to(torch.int32)


def strided(x: Tensor) -> Tensor:
    """The values of x with odd strides: every other element of a buffer, the first two axes swapped in memory."""
    swapped = x.transpose(0, 1) if x.dim() > 1 else x
    buffer = x.new_full((*swapped.shape, 2), float("nan"))
    buffer[..., 0] = swapped
    view = buffer[..., 0]
    return view.transpose(0, 1) if x.dim() > 1 else view


def _as_offsets(cu_seqlens: Tensor | Sequence[int] | None) -> Tensor | None:
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    return torch.tensor(list(cu_seqlens), dtype=torch.int32)


def make_inputs(
    *,
    B: int = 1,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int | None = None,
    gate: str = "softplus",
    dtype: torch.dtype | str = torch.float64,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    alike: float = 0.0,
    beta: float | None = None,
    initial_state: bool = True,
    nan_tail: bool = True,
    layout: str = "contiguous",
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> KDAInputs:
    """Draw one call of `chunk_kda`.

    Args:
        B, T, H, HV, K, V: Sizes; HV defaults to H and V to K.
        gate: A name in `GATES`.
        dtype: Of q, k, v, beta, raw gate logits and the gradient of o; see `KDAInputs.to` for the rest.
        cu_seqlens: Packed offsets; T may lie beyond the last of them.
        alike: Weight of a direction that all keys of a head share: 0 gives independent keys, 10 a cosine near 0.99.
        beta: A constant write strength; None draws it in (0, 1).
        initial_state: Whether sequences start from a drawn state.
        nan_tail: Whether tokens after the last offset are NaN, in the inputs and in the gradient of o.
        layout: "contiguous", or "strided" for non-contiguous token tensors (see `strided`).
        seed: Same seed, same numbers, whatever the dtype and the device.
        device: Where the tensors end up.
        options: Passed on to `chunk_kda` as they are. With `use_qk_l2norm_in_kernel` q and k are not normalised here,
            with `use_beta_sigmoid_in_kernel` beta is drawn as logits.
    Raises: ValueError for an unknown gate or layout.
    """
    if gate not in GATES:
        raise ValueError(f"make_inputs: gate must be one of {', '.join(GATES)}, got {gate!r}")
    if layout not in ("contiguous", "strided"):
        raise ValueError(f'make_inputs: layout must be "contiguous" or "strided", got {layout!r}')
    HV, V = HV or H, V or K
    offsets = _as_offsets(cu_seqlens)
    N = B if offsets is None else len(offsets) - 1
    rng = Generator().manual_seed(seed)
    q, k = _normal(rng, B, T, H, K), _normal(rng, B, T, H, K) + alike * _normal(rng, 1, 1, H, K)
    if not options.get("use_qk_l2norm_in_kernel"):
        q, k = unit(q), unit(k)
    logits = _normal(rng, B, T, HV)
    write = logits if options.get("use_beta_sigmoid_in_kernel") else logits.sigmoid()
    drawn = GATES[gate](rng, (B, T, HV, K))
    inputs = KDAInputs(
        q=q,
        k=k,
        v=_normal(rng, B, T, HV, V),
        g=drawn.g,
        beta=write if beta is None else torch.full_like(write, beta),
        initial_state=0.3 * _normal(rng, N, HV, K, V) if initial_state else None,
        A_log=drawn.A_log,
        dt_bias=drawn.dt_bias,
        cu_seqlens=offsets,
        options=dict(drawn.options) | options,
        grad_o=_normal(rng, B, T, HV, V),
        grad_final_state=0.3 * _normal(rng, N, HV, K, V),
    )
    if options.get("state_v_first"):
        inputs = replace(
            inputs, grad_final_state=_swapped(inputs.grad_final_state), initial_state=_swapped(inputs.initial_state)
        )
    if nan_tail:
        for tensor in (*inputs.args, inputs.grad_o):
            tensor[:, inputs.num_tokens :] = float("nan")
    inputs = inputs.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype, device)
    if layout == "strided":
        inputs = replace(inputs, **{n: strided(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta", "grad_o")})
    return inputs


def _swapped(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2).contiguous()
