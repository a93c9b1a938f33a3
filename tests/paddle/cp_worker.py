"""A rank of tests/paddle/test_cp_kda.py: `python cp_worker.py FOLDER` computes every case and leaves one file each."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle
import openkda
from openkda.paddle.nn import KimiDeltaAttention
from openkda.parallel.context import CPContext

INSIDE = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
}
#: name -> (offsets, order, options of chunk_kda)
CASES = {
    "packed": ((0, 37, 37, 41, 98, 131, 160), "contiguous", {}),
    "zigzag": ((0, 150, 160), "zigzag", INSIDE),
    "no_final_state": ((0, 90, 160), "contiguous", {"output_final_state": False}),
}
HV, K, V, W = 4, 16, 24, 4
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "x", "weight", "conv_state")


def arrays(case: str) -> dict[str, np.ndarray]:
    """Inputs of all ranks, and the gradients of the results."""
    offsets, _, options = CASES[case]
    rng, T, N = np.random.default_rng(0), offsets[-1], len(offsets) - 1
    sizes = {"q": (1, T, 2, K), "k": (1, T, 2, K), "v": (1, T, HV, V), "g": (1, T, HV, K), "beta": (1, T, HV)}
    sizes |= {"A_log": (HV,), "dt_bias": (HV, K), "initial_state": (N, HV, K, V), "do": (1, T, HV, V)}
    sizes |= {"dfinal": (N, HV, K, V), "x": (1, T, 5), "weight": (5, W), "conv_state": (N, 5, W - 1)}
    drawn = {name: rng.standard_normal(size).astype("float32") for name, size in sizes.items()}
    drawn["k"] /= np.linalg.norm(drawn["k"], axis=-1, keepdims=True)
    if not options.get("use_gate_in_kernel"):
        drawn["g"], drawn["beta"] = -np.abs(drawn["g"]), 1 / (1 + np.exp(-drawn["beta"]))
    return drawn


def share(rank: int, size: int) -> float:
    return 2.0 * (rank + 1) / (size * (size + 1))


def run(case: str, cp: CPContext | None) -> dict[str, np.ndarray]:
    """Results and gradients; without a context, of everything in one process."""
    offsets, _, options = CASES[case]
    drawn = {name: paddle.to_tensor(array) for name, array in arrays(case).items()}
    if cp is not None:
        for name in ("q", "k", "v", "g", "beta", "do", "x"):
            drawn[name] = cp.local_tokens(drawn[name])
        drawn["dfinal"] = drawn["dfinal"] * share(cp.rank, cp.size)
    for name in NAMES:
        drawn[name].stop_gradient = False
    where = {"cp_context": cp} if cp is not None else {"cu_seqlens": paddle.to_tensor(offsets, dtype="int32")}
    kda = {"output_final_state": True, "initial_state": drawn["initial_state"]} | options
    wanted = [*NAMES]
    if options.get("use_gate_in_kernel"):
        kda |= {"A_log": drawn["A_log"], "dt_bias": drawn["dt_bias"]}
    else:
        wanted = [name for name in wanted if name not in ("A_log", "dt_bias")]
    o, final = openkda.chunk_kda(*(drawn[name] for name in NAMES[:5]), **kda, **where)
    state = {"initial_state": drawn["conv_state"], "output_final_state": True}
    y, last = openkda.causal_conv1d(drawn["x"], drawn["weight"], activation="silu", **state, **where)
    loss = (o * drawn["do"]).sum() + (y * y).sum()
    weight = share(cp.rank, cp.size) if cp is not None else 1.0
    loss = loss + (last * last).sum() * weight
    results = {"o": o, "y": y, "last": last}
    if final is not None:
        loss, results["final"] = loss + (final * drawn["dfinal"]).sum(), final
    grads = paddle.grad([loss], [drawn[name] for name in wanted])
    results |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    results |= run_layer(cp, where)
    return {name: value.numpy() for name, value in results.items()}


def run_layer(cp: CPContext | None, where: dict) -> dict[str, paddle.Tensor]:
    """The layer on tokens of its own."""
    paddle.seed(0)
    layer = KimiDeltaAttention(12, 2, 8)
    x = paddle.to_tensor(np.random.default_rng(1).standard_normal((1, 160, 12)).astype("float32"))
    x = x if cp is None else cp.local_tokens(x).clone()
    x.stop_gradient = False
    y = layer(x, **where)
    (y * y).sum().backward()
    return {"layer y": y, "layer dx": x.grad} | {f"layer.{n}": p.grad for n, p in layer.named_parameters()}


def main(folder: str) -> None:
    paddle.distributed.init_parallel_env()
    for case, (offsets, order, _) in CASES.items():
        cp = openkda.build_cp_context(paddle.to_tensor(offsets, dtype="int64"), None, order=order, conv_width=W)
        np.savez(Path(folder) / f"{case}-{cp.rank}.npz", **run(case, cp))


if __name__ == "__main__":
    main(sys.argv[1])
