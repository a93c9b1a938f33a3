"""Training in parallel is training on one process: losses, and the first gradients parameter by parameter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openkda.integrations.torchtitan import config_registry
from openkda.integrations.torchtitan.parallelize import _reject_unsupported
from openkda.testing import relative_rms
from openkda.testing.processes import run_processes

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("torchtitan_layouts", HERE / "layouts.py")
assert _spec is not None
assert _spec.loader is not None
layouts = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = layouts
_spec.loader.exec_module(layouts)

FIRST_LOSS, LAST_LOSS = 2e-5, 1e-4  # nats: what fp32 sums in another order may do in one and five steps
GRADIENT = 5e-6  # relative RMS
SLOW = {"hsdp2", "cp2_in_order", "cp2_selective", "cp2_full", "cp2_tp2", "pp2", "turns"}
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """What every rank of a layout found. Layouts of one size that are to be tested share their processes."""
    folder = tmp_path_factory.mktemp("layouts")
    asked = {item.callspec.params["name"] for item in request.session.items if "layout" in item.name and _has(item)}
    started: set[int] = set()

    def of(name: str) -> list[dict[str, Any]]:
        size = layouts.LAYOUTS[name].size
        for n in sorted({1, size} - started):
            started.add(n)
            names = ["seed", "single"] if n == 1 else [m for m in layouts.LAYOUTS if _size(m) == n and m in asked]
            run_processes(HERE / "layouts.py", n, str(folder), *names)
        return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(size)]

    return of


def _has(item: Any) -> bool:
    return "name" in getattr(getattr(item, "callspec", None), "params", {})


def _size(name: str) -> int:
    return layouts.LAYOUTS[name].size


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in layouts.LAYOUTS if n != "single"]
)
def test_layout_trains_like_one_process(results: Results, name: str) -> None:
    ranks = results(name)
    (single,) = results("single")
    pipeline = "pipeline_parallel_degree" in layouts.LAYOUTS[name].degrees
    losses = ranks[-1]["losses"]  # with a pipeline only its end knows them
    assert len(losses) == layouts.STEPS
    assert losses.keys() == single["losses"].keys()
    assert abs(losses[1] - single["losses"][1]) < FIRST_LOSS
    assert abs(losses[5] - single["losses"][5]) < LAST_LOSS
    assert single["losses"][5] < single["losses"][1]
    biases = {n: b for rank in ranks for n, b in rank["biases"].items()}
    assert biases.keys() == single["biases"].keys()
    assert all(torch.equal(b, single["biases"][n]) for n, b in biases.items())
    assert any(b.any() for b in biases.values())
    if name == "turns":
        return
    gradients = {n: g for rank in ranks for n, g in rank["gradients"].items()}
    assert gradients.keys() == single["gradients"].keys()
    errors = {n: relative_rms(gradients[n], exact) for n, exact in single["gradients"].items()}
    assert {n: e for n, e in errors.items() if not e < GRADIENT} == {}
    if not pipeline:
        for rank in ranks[1:]:
            assert all(torch.equal(g, ranks[0]["gradients"][n]) for n, g in rank["gradients"].items())


# ---------------------------------------------------------------- what is refused
def reject(config: Any, *, world_size: int = 2, cp: int = 1) -> None:
    dims = SimpleNamespace(world_size=world_size, cp_enabled=cp > 1)
    _reject_unsupported(dims, config.parallelism)  # type: ignore[arg-type]


def test_spmd_types_is_refused_on_several_processes() -> None:
    config = config_registry.kimi_linear_tiny()
    config.parallelism.spmd_backend = "spmd_types"
    reject(config, world_size=1)
    with pytest.raises(NotImplementedError, match="spmd_backend must be 'partial_dtensor', got 'spmd_types'"):
        reject(config)


def test_a_load_balancer_that_reorders_freely_is_refused() -> None:
    config = config_registry.kimi_linear_tiny()
    config.parallelism.context_parallel_load_balancer = "ptrr"
    reject(config)
    with pytest.raises(NotImplementedError, match="context_parallel_load_balancer must be 'headtail' or None"):
        reject(config, cp=2)
