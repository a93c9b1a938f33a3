"""One row of `openkda bench layer`: the whole KimiDeltaAttention layer beside fla's, with the same weights.

What the projections cost alone (their matmuls, forward and backward, on the same sizes) is measured too: the rest is
what a KDA implementation can do something about.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openkda.bench import measure
from openkda.bench.op import Save, error
from openkda.bench.peers import LOWER_BOUND, one_line

#: Names in openkda's layer -> in fla's, where they differ.
FLA_NAMES = {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}


@dataclass(frozen=True)
class Case:
    """Sizes, gate, dtype and device of one layer."""

    B: int
    T: int
    H: int
    K: int = 128
    hidden: int = 2304
    gate: str = "softplus"
    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = "auto"

    @property
    def lower_bound(self) -> float | None:
        return LOWER_BOUND if self.gate == "bounded" else None


def openkda_layer(case: Case) -> nn.Module:
    """Ours, freshly drawn from seed 0."""
    from openkda.nn import KimiDeltaAttention

    torch.manual_seed(0)
    new = {"device": case.device, "dtype": getattr(torch, case.dtype)}
    return KimiDeltaAttention(
        case.hidden, case.H, case.K, lower_bound=case.lower_bound, backend=case.backend, layer_idx=0, **new
    )


def fla_layer(case: Case) -> nn.Module:
    """fla's, not initialised alike: `with_weights_of` comes next."""
    from fla.layers.kda import KimiDeltaAttention

    bound = case.lower_bound
    layer = KimiDeltaAttention(
        hidden_size=case.hidden, head_dim=case.K, num_heads=case.H, safe_gate=bound is not None, lower_bound=bound
    )
    gate = {name: getattr(layer, name).detach().to(case.device, copy=True) for name in ("A_log", "dt_bias")}
    layer = layer.to(device=case.device, dtype=getattr(torch, case.dtype))
    for name, value in gate.items():  # stay in fp32, as in ours
        setattr(layer, name, nn.Parameter(value))
    return layer


LAYERS: dict[str, Callable[[Case], nn.Module]] = {"fla": fla_layer}


@torch.no_grad()
def with_weights_of(ours: nn.Module, theirs: nn.Module) -> nn.Module:
    """theirs, with the weights of ours; biases that only theirs has become 0."""
    own = dict(theirs.named_parameters())
    for name, value in ours.named_parameters():
        head, _, rest = name.partition(".")
        target = own.pop(f"{FLA_NAMES.get(head, head)}.{rest}" if rest else name)
        target.copy_(value.view(target.shape))
    for value in own.values():
        value.zero_()
    return theirs


class Projections(nn.Module):
    """The layer's linear maps alone, each on an input of the right size."""

    def __init__(self, layer: Any, x: Tensor) -> None:
        super().__init__()
        named = {name: child for name, child in layer.named_children() if isinstance(child, nn.Linear)}
        self.maps = nn.ModuleDict(named)
        self.inputs = {name: self._input(m.in_features, x) for name, m in named.items()}

    @staticmethod
    def _input(width: int, x: Tensor) -> Tensor:
        """A leaf: x where it fits, else random numbers in its place."""
        fits = x if width == x.shape[-1] else torch.randn(*x.shape[:-1], width).to(x)
        return fits.detach().requires_grad_()

    def forward(self) -> list[Tensor]:
        return [m(self.inputs[name]) for name, m in self.maps.items()]


def run(spec: dict[str, Any], result: dict[str, Any], save: Save) -> None:
    """Fill `result`, saving it after each stage; `spec` as in `op.run`, with the fields of this module's `Case`."""
    case = Case(**spec["case"])
    device = torch.device(case.device)
    save("inputs")
    result["machine"] = measure.machine(device)
    ours = openkda_layer(case)
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.B, case.T, case.hidden)
    x, dy = (torch.randn(shape, device=device, generator=generator).to(getattr(torch, case.dtype)) for _ in range(2))
    x.requires_grad_()
    layers = {"openkda": ours}
    found = result["implementations"] = {"openkda": {"note": "", "reason": None}}
    if peer := spec["peer"]:
        found[peer] = {"note": "", "reason": None}
        save(f"import of {peer}")
        try:
            layers[peer] = with_weights_of(ours, LAYERS[peer](case))
        except Exception as problem:  # a peer may fail in any way while it is imported
            found[peer]["reason"] = f"cannot be used here: {one_line(problem)}"
    outputs = first_calls(layers, found, x, dy, save)
    compare(ours, outputs, found, x, save)
    outputs.clear()
    times(layers, found, ours, x, dy, spec, save)
    save("done")


def call(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


def both(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the input and every parameter."""
    return torch.autograd.grad(call(layer, x), [x, *layer.parameters()], dy, allow_unused=True)


def first_calls(
    layers: dict[str, nn.Module], found: dict[str, Any], x: Tensor, dy: Tensor, save: Save
) -> dict[str, Tensor]:
    """Output of each layer's first call, and its seconds with the backward. Failures leave `layers`."""
    outputs = {}
    for name in list(layers):
        save(f"first call of {name}")
        start = time.perf_counter()
        try:
            both(layers[name], x, dy)
            with torch.no_grad():
                outputs[name] = call(layers[name], x)
            if x.is_cuda:
                torch.cuda.synchronize()
        except Exception as problem:  # whatever a peer does wrong belongs in its line of the table
            found[name]["reason"] = f"failed: {one_line(problem)}"
            del layers[name]
            continue
        found[name]["first_call_s"] = round(time.perf_counter() - start, 2)
    return outputs


@torch.no_grad()
def compare(ours: nn.Module, outputs: dict[str, Tensor], found: dict[str, Any], x: Tensor, save: Save) -> None:
    """Relative RMS error of each output against our layer in fp64 on plain operations, same weights."""
    save("fp64")
    exact_layer = copy.deepcopy(ours).double()
    for module in exact_layer.modules():
        if hasattr(module, "backend"):
            module.backend = "eager"  # type: ignore[assignment]
    try:
        exact = call(exact_layer, x.double())
    except torch.OutOfMemoryError:
        return
    for name, y in outputs.items():
        found[name]["errors"] = {"y": error(y, exact)}


def times(
    layers: dict[str, nn.Module],
    found: dict[str, Any],
    ours: nn.Module,
    x: Tensor,
    dy: Tensor,
    spec: dict[str, Any],
    save: Save,
) -> None:
    """Forward, forward + backward, the projections alone, memory, kernels; all timed in turns."""
    projections = Projections(ours, x.detach())
    grads = [torch.randn_like(y) for y in projections()]
    wanted = [*projections.parameters(), *projections.inputs.values()]

    def inference(layer: nn.Module) -> Tensor:
        with torch.no_grad():
            return call(layer, x)

    save("forward calls")
    forward = {name: lambda layer=layer: inference(layer) for name, layer in layers.items()}
    for name, ms in measure.alternate(forward, spec["repeats"], x.device).items():
        found[name]["forward_ms"] = measure.percentiles(ms)
    save("forward_backward calls")
    calls: dict[str, measure.Call] = {name: lambda layer=layer: both(layer, x, dy) for name, layer in layers.items()}
    calls["projections"] = lambda: torch.autograd.grad(projections(), wanted, grads)
    ms = {name: measure.percentiles(t) for name, t in measure.alternate(calls, spec["repeats"], x.device).items()}
    for name in layers:
        found[name]["forward_backward_ms"] = ms[name]
        found[name]["projections_ms"] = ms["projections"]
        found[name]["outside_projections_ms"] = round(ms[name]["p50"] - ms["projections"]["p50"], 4)
    if x.device.type != "cuda":
        return
    for name, layer in layers.items():
        save(f"memory of {name}")
        leaves = [x, *layer.parameters()]
        found[name] |= measure.memory(
            lambda layer=layer: call(layer, x),
            lambda y, leaves=leaves: torch.autograd.grad(y, leaves, dy, allow_unused=True),
        )
        if spec["kernels"]:
            save(f"kernels of {name}")
            found[name]["kernels"] = measure.kernels(calls[name])
