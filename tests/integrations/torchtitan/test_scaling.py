"""docs/scaling.md says what benchmarks/scaling.py computes, and that agrees with the model and with what is sent."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scaling.md").read_text()


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_page_has_the_tables(scaling: ModuleType) -> None:
    assert scaling.memory_table() in PAGE
    assert scaling.traffic_table() in PAGE


@pytest.mark.parametrize("flavor", ["48B-A3B", "debug"])
def test_parameters_are_those_of_the_model(scaling: ModuleType, flavor: str) -> None:
    from openkda.integrations.torchtitan.builders import SIZES, model_config

    with torch.device("meta"):
        parameters = dict(model_config(SIZES[flavor], attention_backend="masked").build().named_parameters())
    experts = sum(p.numel() for name, p in parameters.items() if "inner_experts" in name)
    model = scaling.Model(SIZES[flavor])
    assert model.experts == experts
    assert model.rest == sum(p.numel() for p in parameters.values()) - experts


def test_formulas_of_the_page(scaling: ModuleType) -> None:
    run = next(r for r in scaling.runs() if (r.gpus, r.tokens) == (64, 1 << 20))
    P_experts, P_rest, D, H, K, F, L, t, T = run.model.experts, run.model.rest, 2304, 32, 128, 1024, 27, 16384, 1 << 20
    assert (round(P_experts / 1e9, 1), round(P_rest / 1e9, 1)) == (47.1, 2.0)
    exact = {
        "states": 16 * (P_experts + P_rest) / 64,
        "activations": t * (2 * D * L + 4500 * H + 48 * H * K + 64 * (D + 1.5 * F)),
        "keys_and_values": 4 * T * H * 320,
        "logits": 6 * 2048 * 163840,
        "fsdp": 8 * (P_rest * (1 - 1 / 64) + P_experts / 8 * (1 - 8 / 64)),
        "ep": 6 * 26 * t * 8 * 2 * D * (1 - 1 / 8),
        "sent_kda": 2 * H * K * 256 * 4,
        "cp_kda": 3 * 20 * (2 * H * K * 256 * 4 + 2 * 3 * 3 * H * K * 2) * 63,
        "cp_mla": 3 * 7 * 2 * T * (1 - 1 / 64) * H * 320,
        "compute_s": 4 * (2 * run.model.active + 7 * H * 320 * T + 20 * 6 * H * K * K) * t / (0.4 * 989e12),
    }
    for name, value in exact.items():
        assert math.isclose(getattr(run, name), value, rel_tol=1e-12), name
