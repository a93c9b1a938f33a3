"""The operators over several processes give what one process gives: every result and gradient, on every rank."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from openkda import testing
from openkda.parallel.context import CPContext
from openkda.testing.processes import run_processes

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("context_parallel_cases", HERE / "cases.py")
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = cases
_spec.loader.exec_module(cases)

pytestmark = pytest.mark.processes
PARAMETERS = {"dA_log", "ddt_bias", "dinitial_state", "dweight", "dbias", "dstate"}
"""Gradients of what every rank holds: each has its share."""
SAME_EVERYWHERE = {"final_state", "last"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Folder with the results of all ranks for a case; cases of one world are computed together, once."""
    folders: dict[tuple[int, bool], Path] = {}

    def of(case: Any) -> Path:
        interpreted = cases.chosen(case, interpreted=True)
        world = case.size, interpreted
        done = world in folders
        folder = folders.setdefault(world, tmp_path_factory.mktemp("ranks"))
        if not done:
            env = {"TRITON_INTERPRET": str(int(interpreted))}
            run_processes(HERE / "cases.py", case.size, str(folder), env=env)
        return folder

    return of


def context(case: Any, rank: int) -> CPContext:
    tokens = case.T or case.offsets[-1]
    where = {"rank": rank, "size": case.size, "order": case.order, "rows": case.rows}
    return CPContext(case.offsets, tokens, group=None, conv_width=None, **where)


def check(case: Any, exact: dict[str, Tensor], ranks: list[dict[str, Tensor]], limit: float) -> None:
    wrong = []
    for name, want in exact.items():
        if name in PARAMETERS or name.startswith("layer."):
            total = sum(rank[name].double() for rank in ranks)
            wrong += [f"{name}: {e:.2e}" for e in [testing.relative_rms(total, want)] if not e <= limit]
            continue
        for rank, result in enumerate(ranks):
            if name in SAME_EVERYWHERE:
                assert torch.equal(result[name], ranks[0][name]), f"{name} of rank {rank} is not that of rank 0"
            part = want if name in SAME_EVERYWHERE else context(case, rank).local_tokens(want)
            error = testing.relative_rms(result[name], part)
            wrong += [f"{name} on rank {rank}: {error:.2e}"] if not error <= limit else []
    assert not wrong, f"{case.name}: {', '.join(wrong)} above {limit:.0e}"


def loaded(results: Callable[[Any], Path], case: Any) -> list[dict[str, Any]]:
    return [torch.load(results(case) / f"{case.name}-{rank}.pt") for rank in range(case.size)]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.size}-{case.name}")
def test_chunk_kda_equals_one_process(results: Callable[[Any], Path], case: Any) -> None:
    inputs = case.inputs()
    if not case.final:
        inputs.grad_final_state.zero_()
    exact = testing.oracle(inputs)
    if not case.final:
        del exact["final_state"]
    limit = testing.FP64_LIMIT if inputs.q.dtype == torch.float64 else testing.FP32_LIMIT
    check(case, exact, [result["kda"] for result in loaded(results, case)], limit)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.size}-{case.name}")
def test_causal_conv1d_equals_one_process(results: Callable[[Any], Path], case: Any) -> None:
    exact = cases.run_conv(case, None)
    check(case, exact, [result["conv"] for result in loaded(results, case)], testing.FP32_LIMIT)


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.name in cases.LAYER], ids=lambda case: case.name)
def test_layer_equals_one_process(results: Callable[[Any], Path], case: Any) -> None:
    exact = cases.run_layer(case, None)
    check(case, exact, [result["layer"] for result in loaded(results, case)], testing.FP32_LIMIT)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.size}-{case.name}")
def test_what_a_rank_sends_does_not_depend_on_the_tokens(results: Callable[[Any], Path], case: Any) -> None:
    inputs = case.inputs()
    (K, (HV, V)), parts = (inputs.q.shape[3], inputs.v.shape[2:]), (2 if case.order == "zigzag" else 1) * case.rows
    width = 8 if inputs.q.dtype == torch.float64 else 4
    maps = parts * HV * K * (K + V) * width
    halo = parts * cases.CHANNELS * (case.width - 1) * 4
    ends = [sum(piece.ends for piece in context(case, rank).pieces) for rank in range(case.size)]
    for result in loaded(results, case):
        # One gather of maps a direction; where final states are asked for, one of those a direction, which backward
        # brings the gradients of all of them.
        state = max(ends) * HV * K * V * width if case.final else 0
        assert result["sent"] == [n for n in (maps, state, case.size * state, maps) if n]
        last = max(ends) * cases.CHANNELS * (case.width - 1) * 4
        assert result["conv_sent"] == [n for n in (halo, last, case.size * last, halo) if n]
