"""Other implementations of the operator, each behind the same small interface. Written from their public signatures.

Every one gets the same tensors: raw q, k, gate and beta, `[B, T, H, K]` and `[B, T, H]`, A_log `[H]`, dt_bias `[H, K]`.
What an implementation does not do inside (normalise q and k, activate the gate, sigmoid of beta) its adapter does
before the call, and that is timed, except for `cudnn_core`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from openkda import __version__

#: lower_bound of the bounded gate, in nats.
LOWER_BOUND = -5.0
#: Everything inside the operator, for implementations with fla's names.
FLAGS = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}


@dataclass(frozen=True)
class Case:
    """One call: sizes, which gate, how its inputs are drawn, in which dtype and where."""

    B: int
    T: int
    H: int
    K: int = 128
    gate: str = "bounded"
    gates_drawn: str = "benchmark"
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = "auto"

    @property
    def lower_bound(self) -> float | None:
        return LOWER_BOUND if self.gate == "bounded" else None


class Implementation:
    """How one implementation is called. `__init__` imports it."""

    name: ClassVar[str]
    module: ClassVar[str]  # what it is imported from
    distributions: ClassVar[tuple[str, ...]]  # whose versions belong in the results
    install: ClassVar[str]
    note: ClassVar[str] = ""
    environment: ClassVar[dict[str, str]] = {}  # set before the process of its row starts
    has_backward: ClassVar[bool] = True

    def __init__(self, case: Case) -> None:
        self.case = case

    @classmethod
    def versions(cls) -> dict[str, str]:
        found = {}
        for name in cls.distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "unknown"
        return found

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """The leaves that `forward` takes. Not timed."""
        return {name: tensor.detach().requires_grad_(self.has_backward) for name, tensor in x.items()}

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        """o `[B, T, H, K]`."""
        raise NotImplementedError


class OpenKDA(Implementation):
    name = "openkda"
    module = "openkda"
    distributions = ("openkda",)
    install = "pip install openkda"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from openkda import chunk_kda

        self._chunk_kda = chunk_kda

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"openkda": __version__}  # also right for a checkout that is not installed

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self._chunk_kda(**x, lower_bound=self.case.lower_bound, backend=self.case.backend, **FLAGS)[0]


class Fla(Implementation):
    name = "fla"
    module = "fla"
    distributions = ("fla-core",)
    install = "pip install fla-core"
    note = "all activations in its kernels; safe_gate with the bounded gate"
    environment: ClassVar = {"FLA_FLASH_KDA": "0"}  # by itself it would hand calls without gradient to FlashKDA

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from fla.ops.kda import chunk_kda

        self._chunk_kda = chunk_kda

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        bound = self.case.lower_bound
        x = {**x, "dt_bias": x["dt_bias"].reshape(-1)}
        return self._chunk_kda(**x, safe_gate=bound is not None, lower_bound=bound, **FLAGS)[0]


class AttnGym(Implementation):
    name = "attn_gym"
    module = "attn_gym"
    distributions = ("attn-gym", "nvidia-cutlass-dsl")
    install = "pip install 'attn-gym[linear]'"
    note = "its gate_transform and l2norm before chunk_kda, timed"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from attn_gym.linear import chunk_kda, gate_transform, l2norm

        self._chunk_kda, self._gate, self._l2norm = chunk_kda, gate_transform, l2norm

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        gate = self._gate(x["g"], x["A_log"], x["dt_bias"], kind=self.case.gate, lower_bound=self.case.lower_bound)
        q, k = self._l2norm(x["q"]), self._l2norm(x["k"])
        return self._chunk_kda(q, k, x["v"], gate, x["beta"].float().sigmoid())[0]


def activate(
    lower_bound: float | None, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised q and k in their dtype, log-decay and beta in fp32, by plain operations."""

    def unit(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    rate, raw = A_log.exp()[:, None], g.float() + dt_bias
    decay = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return unit(q), unit(k), decay, beta.float().sigmoid()


class CudnnCore(Implementation):
    """kimi_delta_attention of cuDNN's front end with everything activated beforehand, as its Hopper engine wants it."""

    name = "cudnn_core"
    module = "cudnn"
    distributions = ("nvidia-cudnn-frontend",)
    install = "pip install nvidia-cudnn-frontend cuda-python"
    note = "gate, l2norm and sigmoid before the call, NOT timed; plan kda_hopper_cuda"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from cudnn.linear_attention import kimi_delta_attention

        self._attend = kimi_delta_attention
        self._offsets = torch.arange(case.B + 1, dtype=torch.int32, device=case.device) * case.T

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("q", "k", "g", "beta")
        with torch.no_grad():
            ready = activate(self.case.lower_bound, *(x[n] for n in (*names, "A_log", "dt_bias")))
        return super().inputs({"v": x["v"], **dict(zip(names, ready, strict=True))})

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self._call(x["q"], x["k"], x["v"], x["g"], x["beta"])

    def _call(self, *tokens: Tensor) -> Tensor:
        packed = (t.flatten(0, 1) for t in tokens)
        o = self._attend(*packed, self._offsets, plan_name="kda_hopper_cuda")
        return (o if isinstance(o, Tensor) else o[0]).view(self.case.B, self.case.T, self.case.H, self.case.K)


class Cudnn(CudnnCore):
    """The same from raw tensors, as a layer would call it: the activations compiled by torch.compile, and timed."""

    name = "cudnn"
    note = "gate, l2norm and sigmoid by torch.compile before the call, timed; plan kda_hopper_cuda"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._activate = torch.compile(activate, fullgraph=True)

    def inputs(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return Implementation.inputs(self, x)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        q, k, g, beta = self._activate(
            self.case.lower_bound, x["q"], x["k"], x["g"], x["beta"], x["A_log"], x["dt_bias"]
        )
        return self._call(q, k, x["v"], g, beta)


class FlashKDA(Implementation):
    name = "flash_kda"
    module = "flash_kda"
    distributions = ("flash_kda",)
    install = "build it from https://github.com/MoonshotAI/FlashKDA"
    note = "forward only, bounded gate only"
    has_backward = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.lower_bound is None:
            raise ValueError("flash_kda has the bounded gate only")
        import flash_kda

        self._fwd = flash_kda.fwd

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        o = torch.empty_like(x["v"])
        tokens = (x[name] for name in ("q", "k", "v", "g", "beta"))
        self._fwd(*tokens, self.case.K**-0.5, o, x["A_log"], x["dt_bias"], self.case.lower_bound)
        return o


PEERS: dict[str, type[Implementation]] = {cls.name: cls for cls in (Fla, AttnGym, Cudnn, CudnnCore, FlashKDA)}


def load(make: Callable[[Any], Implementation], case: Any) -> Implementation | str:
    """The implementation, or in one line why there is none."""
    try:
        return make(case)
    except Exception as error:  # a peer may fail in any way while it is imported
        return one_line(error)


def one_line(error: BaseException) -> str:
    """An error as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: "
    return (kind + text)[:200]
