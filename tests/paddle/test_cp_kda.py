"""Context parallelism on Paddle: two processes over gloo give what one does, results and gradients, on each rank."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

import openkda
from openkda.paddle.nn import KimiDeltaAttention
from openkda.parallel.context import CPContext
from openkda.testing.processes import run_processes

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("paddle_cp_worker", HERE / "cp_worker.py")
worker = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = worker
_spec.loader.exec_module(worker)

SIZE = 2
SHARED = {"dA_log", "ddt_bias", "dinitial_state", "dweight", "dconv_state"}
SAME_EVERYWHERE = {"final", "last"}
LIMIT = 5e-6  # relative RMS, fp32
Q = paddle.zeros([1, 4, 1, 8])
MESSAGE = "cp_context must come from build_cp_context, got str"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    backend = {"PADDLE_DISTRI_BACKEND": "gloo", "FLAGS_selected_cpus": "0"}
    run_processes(HERE / "cp_worker.py", SIZE, str(folder), env=backend)
    return folder


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    error = np.sqrt(np.mean(np.square(got.astype("float64") - want)))
    return error / max(np.sqrt(np.mean(np.square(want.astype("float64")))), 1e-30)


@pytest.mark.processes
@pytest.mark.parametrize("case", worker.CASES)
def test_two_processes_equal_one(folder: Path, case: str):
    offsets, order, _ = worker.CASES[case]
    want = worker.run(case, None)
    ranks = [dict(np.load(folder / f"{case}-{rank}.npz")) for rank in range(SIZE)]
    assert ranks[0].keys() == want.keys()
    for name, exact in want.items():
        if name in SHARED or name.startswith("layer."):
            assert relative_rms(sum(rank[name] for rank in ranks), exact) < LIMIT, name
            continue
        for rank, result in enumerate(ranks):
            where = {"group": None, "rank": rank, "size": SIZE, "order": order, "rows": 1, "conv_width": None}
            cp = CPContext(offsets, offsets[-1], **where)
            part = exact if name in SAME_EVERYWHERE else cp.local_tokens(paddle.to_tensor(exact)).numpy()
            assert relative_rms(result[name], part) < LIMIT, f"{name} on rank {rank}"


def test_chunk_kda_wants_a_context():
    with pytest.raises(TypeError, match=f"^chunk_kda: {MESSAGE}"):
        openkda.chunk_kda(Q, Q, Q, Q, Q[..., 0], cp_context="context")


def test_causal_conv1d_wants_a_context():
    with pytest.raises(TypeError, match=f"^causal_conv1d: {MESSAGE}"):
        openkda.causal_conv1d(Q[:, :, 0], paddle.zeros([8, 4]), cp_context="context")


def test_the_layer_wants_a_context():
    with pytest.raises(TypeError, match=MESSAGE):
        KimiDeltaAttention(8, 1, 8)(paddle.zeros([1, 4, 8]), cp_context="context")
