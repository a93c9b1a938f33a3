"""What the context-parallel operators are run on: one list for the ranks and for the process that judges them.

Also the program of a rank: `python cases.py FOLDER` computes every case of its world size and leaves one file a case.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import openkda
from openkda import testing
from openkda.parallel.context import CPContext
from openkda.testing import KDAInputs

CHANNELS = 6


@dataclass(frozen=True)
class Case:
    name: str
    size: int
    """Ranks."""
    offsets: tuple[int, ...]
    T: int | None = None
    """Tokens with padding; None: up to the last offset."""
    order: str = "contiguous"
    rows: int = 1
    width: int = 4
    final: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """Of make_inputs."""

    def inputs(self) -> KDAInputs:
        sizes = {"H": 2, "HV": 4, "K": 16, "V": 24, "dtype": torch.float32} | self.options
        sizes.pop("backend", None)
        return testing.make_inputs(T=self.T or self.offsets[-1], cu_seqlens=self.offsets, **sizes)

    def conv_inputs(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(1)
        T, N = self.T or self.offsets[-1], len(self.offsets) - 1

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=rng, dtype=torch.float64).float()

        x, dy = normal(1, T, CHANNELS), normal(1, T, CHANNELS)
        for tensor in (x, dy):
            tensor[:, self.offsets[-1] :] = float("nan")
        state = (N, CHANNELS, self.width - 1)
        weight, bias = normal(CHANNELS, self.width), normal(CHANNELS)
        return {"x": x, "weight": weight, "bias": bias, "state": normal(*state), "dy": dy, "dlast": normal(*state)}


INSIDE = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
MANY = (0, 37, 37, 41, 130, 131, 170, 240, 256)

CASES = [
    Case("cut_between_chunks", 2, (0, 256), options={"gate": "given"}),
    Case("cut_inside_a_chunk", 2, (0, 202)),
    Case("packed", 2, MANY, options={"gate": "bounded", "H": 4, **INSIDE}),
    Case("packed_zigzag", 2, MANY, order="zigzag", options=INSIDE),
    Case("few_tokens_before_the_cut", 2, (0, 98, 200), options={"gate": "bounded"}),
    Case("few_tokens_after_the_cut", 2, (0, 101, 200), order="zigzag"),
    Case("cut_where_a_sequence_begins", 2, (0, 60, 100, 100, 200)),
    Case("no_initial_state", 2, (0, 90, 200), options={"initial_state": False}),
    Case("no_final_state", 2, (0, 90, 200), final=False),
    Case("value_first", 2, (0, 90, 200), order="zigzag", options={"state_v_first": True}),
    Case("tail", 2, (0, 70, 143), T=160, options={"gate": "bounded"}),
    Case("tail_zigzag", 2, (0, 70, 143), T=200, order="zigzag"),
    Case("a_rank_of_padding", 2, (0, 40, 61), T=160),
    Case("rows", 2, (0, 50, 90, 130, 180), rows=2),
    Case("rows_zigzag", 2, (0, 50, 92, 130, 184), rows=2, order="zigzag"),
    Case("wide_heads", 2, (0, 70, 140), options={"K": 160, "V": 112, "H": 1, "HV": 1}),
    Case("wide_equal_heads", 2, (0, 70, 140), options={"K": 136, "V": 136, "H": 1, "HV": 2}),
    Case("wide_without_gate", 2, (0, 140), options={"K": 136, "V": 136, "H": 1, "HV": 1, "gate": "given"}),
    Case("strong", 2, (0, 90, 200), order="zigzag", options={"gate": "beside"}),
    Case("slow", 2, (0, 256), order="zigzag", options={"gate": "slow", "alike": 10.0}),
    Case("neg_eigval", 2, (0, 90, 200), options={**INSIDE, "allow_neg_eigval": True}),
    Case("fp64", 2, MANY, order="zigzag", options={"dtype": torch.float64}),
    Case("fp64_reference", 2, (0, 33, 60), options={"dtype": torch.float64, "backend": "reference"}),
    Case("triton_zigzag", 2, (0, 10, 40), order="zigzag", options={"backend": "triton", "HV": 2}),
    Case("through_every_rank", 4, (0, 300)),
    Case("through_every_rank_zigzag", 4, (0, 304), order="zigzag", options={"gate": "bounded", **INSIDE}),
    Case("packed_on_four", 4, MANY, options=INSIDE),
    Case("packed_on_four_zigzag", 4, MANY, order="zigzag", options={"gate": "bounded"}),
    Case("ranks_without_the_sequence", 4, (0, 5, 68, 190, 200, 256), order="zigzag"),
    Case("parts_of_one_token", 4, (0, 1, 6, 8), order="zigzag"),
    Case("parts_of_two_tokens", 4, (0, 7, 8)),
    Case("tail_on_four", 4, (0, 33, 91), T=240, order="zigzag"),
    Case("wide_filter", 4, (0, 13, 40), width=9, order="zigzag"),
    Case("filter_of_one", 4, (0, 13, 40), width=1),
    Case("fp64_on_four", 4, (0, 20, 250, 320), order="zigzag", options={"dtype": torch.float64, "gate": "given"}),
]


def share(rank: int, size: int) -> float:
    """What a rank takes of a gradient that all ranks share; the shares add up to 1."""
    return 2.0 * (rank + 1) / (size * (size + 1))


def local_inputs(inputs: KDAInputs, cp: CPContext) -> KDAInputs:
    names = ("q", "k", "v", "g", "beta", "grad_o")
    local = {name: cp.local_tokens(getattr(inputs, name)) for name in names}
    grad = inputs.grad_final_state * share(cp.rank, cp.size)
    return replace(inputs, **local, grad_final_state=grad, cu_seqlens=None)


def run_kda(case: Case, cp: CPContext) -> dict[str, Tensor]:
    inputs = local_inputs(case.inputs(), cp)
    if case.final:
        return testing.run(openkda.chunk_kda, inputs, cp_context=cp, backend=case.options.get("backend", "auto"))

    def without_final_state(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        o, state = openkda.chunk_kda(*args, **kwargs | {"output_final_state": False})
        assert state is None
        return o, o.new_zeros(0)

    empty = replace(inputs, grad_final_state=torch.zeros(0))
    return testing.run(without_final_state, empty, cp_context=cp)


def run_conv(case: Case, cp: CPContext | None, **changes: Any) -> dict[str, Tensor]:
    """Without a context: all of it, in one process."""
    tensors = case.conv_inputs()
    offsets = None if cp else torch.tensor(case.offsets, dtype=torch.int32)
    if cp:
        tensors |= {name: cp.local_tokens(tensors[name]) for name in ("x", "dy")}
        tensors["dlast"] *= share(cp.rank, cp.size)
    leaves = {name: tensors[name].requires_grad_() for name in ("x", "weight", "bias", "state")}
    y, last = openkda.causal_conv1d(
        leaves["x"],
        leaves["weight"],
        leaves["bias"],
        activation="silu",
        initial_state=leaves["state"],
        output_final_state=True,
        cu_seqlens=offsets,
        cp_context=cp,
    )
    grads = torch.autograd.grad((y, last), list(leaves.values()), (tensors["dy"], tensors["dlast"]))
    return {"y": y.detach(), "last": last.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


#: Of CASES, those that the whole layer runs on.
LAYER = ("packed", "packed_zigzag", "rows_zigzag", "parts_of_one_token")


def run_layer(case: Case, cp: CPContext | None) -> dict[str, Tensor]:
    """Without a context: all of it, in one process."""
    torch.manual_seed(0)
    layer = openkda.KimiDeltaAttention(12, num_heads=2, head_dim=8)
    x, dy = torch.randn(2, 1, case.T or case.offsets[-1], 12)
    if cp is None:
        where = {"cu_seqlens": torch.tensor(case.offsets, dtype=torch.int32)}
    else:
        where, x, dy = {"cp_context": cp}, cp.local_tokens(x), cp.local_tokens(dy)
    x = x.clone().requires_grad_()
    y = layer(x, **where)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {f"layer.{n}": p.grad for n, p in layer.named_parameters()}


class Traffic:
    """Counts what this rank hands to collectives, in bytes."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        self._gather = getattr(dist, self._name)

    def __enter__(self) -> Traffic:
        def counted(out: Tensor, x: Tensor, **kwargs: Any) -> Any:
            self.sent.append(x.numel() * x.element_size())
            return self._gather(out, x, **kwargs)

        setattr(dist, self._name, counted)
        return self

    def __exit__(self, *_: Any) -> None:
        setattr(dist, self._name, self._gather)


def chosen(case: Case, *, interpreted: bool) -> bool:
    """Whether a case runs where kernels are, or are not, interpreted: Triton decides that when it is imported."""
    return interpreted == (case.options.get("backend") == "triton")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for case in CASES:
        if case.size != dist.get_world_size() or not chosen(case, interpreted=interpreted):
            continue
        offsets = torch.tensor(case.offsets, dtype=torch.int64)
        options = {"order": case.order, "rows": case.rows, "num_tokens": case.T, "conv_width": case.width}
        cp = openkda.build_cp_context(offsets, None, **options)
        with Traffic() as kda:
            results = run_kda(case, cp)
        with Traffic() as conv:
            results_conv = run_conv(case, cp)
        layer = run_layer(case, cp) if case.name in LAYER else None
        result = {"layer": layer, "kda": results, "conv": results_conv, "sent": kda.sent, "conv_sent": conv.sent}
        torch.save(result, Path(folder) / f"{case.name}-{cp.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
