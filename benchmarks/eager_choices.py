"""The arithmetic choices of the eager operator, each beside the alternative that lost: errors against the fp64 oracle.

    python benchmarks/eager_choices.py            # tables, then one line of JSON

docs/decisions/002-eager-operator.md quotes these tables. An alternative replaces one function of `openkda.kda.eager`
for the length of a run; nothing else differs. Errors are relative RMS, over three seeds. They follow from the inputs
alone and are not timings: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from openkda import testing
from openkda.kda import eager

SEEDS = (0, 1, 2)
SHOWN = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta")


# ---- decay factors
def factors_by_difference(fw: ModuleType, g: Tensor) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
    """decay_factors from one cumulative sum over the chunk and its differences, anchored where each level splits."""
    total = g.cumsum(-2)  # [.., C, K]
    levels = {}
    for h in eager.LEVELS:
        lower, upper = eager._halves(fw, total, h)
        anchor = lower[..., -1:, :]
        levels[h] = (anchor - lower).exp(), (upper - anchor).exp()
    return levels, total.exp(), (total[..., -1:, :] - total).exp(), total[..., -1, :].exp()


def factors_by_difference_of_clamped(fw: ModuleType, g: Tensor) -> Any:
    """The same, with g first raised to -110: exp(-110) is 0 in fp32 already, so nothing else changes."""
    return factors_by_difference(fw, g.clamp_min(-110.0))


# ---- derivative of the solve
class Solve:
    """x = A r, A = (I + n)^-1, with dr = A^T dx and dn = -dr x^T: what `eager.Scan` does."""

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, inverse: Any, n: Any, r: Any, operand_dtype: str | None) -> Any:
        x = eager.rounded_product(fw, inverse, r, operand_dtype)
        ctx.save_for_backward(inverse, x)
        ctx.operand_dtype = operand_dtype
        return x

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, dx: Any) -> tuple:
        inverse, x = ctx.saved_tensors
        dr = eager.rounded_product(fw, fw.swap(inverse), dx, ctx.operand_dtype)
        dn = fw.tril(-eager.rounded_product(fw, dr, fw.swap(x), ctx.operand_dtype), -1)
        return None, dn, dr, None


class SolveThroughInverse:
    """The same with the textbook derivative, through the inverse: dA = dx r^T, dn = -A^T dA A^T."""

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, inverse: Any, n: Any, r: Any, operand_dtype: str | None) -> Any:
        ctx.save_for_backward(inverse, r)
        ctx.operand_dtype = operand_dtype
        return eager.rounded_product(fw, inverse, r, operand_dtype)

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, dx: Any) -> tuple:
        inverse, r = ctx.saved_tensors

        def product(x: Any, y: Any) -> Any:
            return eager.rounded_product(fw, x, y, ctx.operand_dtype)

        transposed = fw.swap(inverse)
        d_inverse = product(dx, fw.swap(r))
        dn = fw.tril(-product(transposed, product(d_inverse, transposed)), -1)
        return None, dn, product(transposed, dx), None


# ---- written values: chunk_states for dense input, by autograd
def states(write: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A scan in which `write(fw, mm, c, S, operands)` gives the written values of chunk c."""

    def chunk_states(
        fw: ModuleType, chunks: Any, S0: Tensor | None, operands: tuple[Tensor, ...], operand_dtype: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mm = eager.Matmul(fw, operand_dtype)
        _, _, _, v, kd, kg, d_all = operands
        S = S0 if S0 is not None else v.new_zeros(v.shape[0], v.shape[2], kd.shape[-1], v.shape[-1])
        before, values = [], []
        for c in range(v.shape[1]):
            before.append(S)
            values.append(write(fw, mm, S, [x[:, c] for x in operands]))
            S = d_all[:, c, ..., None] * S + mm(kg[:, c].transpose(-1, -2), values[-1])
        return torch.stack(before, 1), torch.stack(values, 1), S

    return chunk_states


def by_residual(fw: ModuleType, mm: Any, S: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Vn = A (b (v - k Din S)), with the textbook derivative of A."""
    inverse, n, beta, v, kd, _, _ = operands
    return fw.custom(SolveThroughInverse, inverse, n, beta * (v - mm(kd, S)), mm.operand_dtype)


def by_w_and_u(fw: ModuleType, mm: Any, S: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Vn = U - W S with W = A (b k Din), U = A (b v): the inverse is multiplied in before the scan."""
    inverse, n, beta, v, kd, _, _ = operands
    w, u = (fw.custom(Solve, inverse, n, beta * x, mm.operand_dtype) for x in (kd, v))
    return u - mm(w, S)


def by_w_and_u_in_bf16(fw: ModuleType, mm: Any, S: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The same with U in half the bytes, as it would travel between two kernels."""
    inverse, n, beta, v, kd, _, _ = operands
    w, u = (fw.custom(Solve, inverse, n, beta * x, mm.operand_dtype) for x in (kd, v))
    return u.bfloat16().to(u.dtype) - mm(w, S)


# ---- inverse
def assemble(fw: ModuleType, beta: Tensor, akk_blocks: dict[int, Tensor]) -> Tensor:
    """N = diag(beta) Akk [.., C, C] from its blocks."""
    n = torch.zeros((*beta.shape, 1), dtype=beta.dtype)
    for h, block in akk_blocks.items():
        n = eager._merge(fw, n, eager._halves(fw, beta, h)[1] * block)
    return n[..., 0, :, :]


def inverse_by_neumann(fw: ModuleType, beta: Tensor, akk_blocks: dict[int, Tensor]) -> Tensor:
    """(I - N)(I + N^2)(I + N^4) .. (I + N^32) = (I + N)^-1, as N^64 = 0."""
    with torch.no_grad():
        n = assemble(fw, beta, akk_blocks)
        eye = torch.eye(n.shape[-1], dtype=n.dtype)
        inverse, power = eye - n, n @ n
        for _ in range(5):
            inverse, power = inverse @ (eye + power), power @ power
        return inverse


def inverse_by_substitution(fw: ModuleType, beta: Tensor, akk_blocks: dict[int, Tensor]) -> Tensor:
    """Forward substitution: accurate, one row after another."""
    with torch.no_grad():
        n = assemble(fw, beta, akk_blocks)
        eye = torch.eye(n.shape[-1], dtype=n.dtype)
        return torch.linalg.solve_triangular(eye + n, eye.expand_as(n), upper=False, unitriangular=True)


Choice = tuple[str, dict[str, Callable[..., Any] | type]]  # name, and what it replaces in openkda.kda.eager
Inputs = dict[str, Any]

QUESTIONS: dict[str, tuple[list[Choice], dict[str, Inputs], str | None]] = {
    "decay factors, fp32 inputs": (
        [
            ("levels (openkda)", {}),
            ("differences of one sum", {"decay_factors": factors_by_difference}),
            ("differences, g clamped", {"decay_factors": factors_by_difference_of_clamped}),
        ],
        {
            "softplus": {"gate": "softplus"},
            "-1000 beside -0.01": {"gate": "beside"},
            "1e-4 .. 1000 mixed": {"gate": "log_uniform"},
        },
        None,
    ),
    "inverse, fp32 inputs": (
        [
            ("doubling (openkda)", {}),
            ("substitution", {"triangular_inverse": inverse_by_substitution}),
            ("Neumann", {"triangular_inverse": inverse_by_neumann}),
        ],
        {
            "independent keys": {"gate": "slow"},
            "key cosine 0.5, beta 1": {"gate": "slow", "alike": 1.0, "beta": 1.0},
            "key cosine 0.99, beta 1": {"gate": "slow", "alike": 10.0, "beta": 1.0},
        },
        None,
    ),
    "written values, bf16 operands": (
        [
            ("residual form (openkda)", {}),
            ("W and U, U in fp32", {"chunk_states": states(by_w_and_u)}),
            ("W and U, U in bf16", {"chunk_states": states(by_w_and_u_in_bf16)}),
        ],
        {
            "softplus": {"gate": "softplus"},
            "slow": {"gate": "slow"},
            "slow, key cosine 0.8": {"gate": "slow", "alike": 2.0},
        },
        "bfloat16",
    ),
    "derivative of the solve, bf16 operands": (
        [("-dr x^T (openkda)", {}), ("through the inverse", {"chunk_states": states(by_residual)})],
        {
            "softplus": {"gate": "softplus"},
            "slow": {"gate": "slow"},
            "slow, key cosine 0.8": {"gate": "slow", "alike": 2.0},
        },
        "bfloat16",
    ),
}


def errors(choice: Choice, options: Inputs, operand_dtype: str | None, T: int) -> dict[str, float]:
    """Relative RMS error of every tensor, pooled over the seeds."""
    pooled = dict.fromkeys(SHOWN, 0.0)
    dtype = "float32" if operand_dtype is None else operand_dtype
    for seed in SEEDS:
        inputs = testing.make_inputs(T=T, H=2, K=64, V=64, dtype=dtype, seed=seed, **options)
        exact = testing.oracle(inputs)
        with patch.multiple(eager, **choice[1]) if choice[1] else patch.dict({}):
            got = testing.run(eager.chunk_kda, inputs, operand_dtype=operand_dtype)
        for name in SHOWN:
            pooled[name] += testing.relative_rms(got[name], exact[name]) ** 2 / len(SEEDS)
    return {name: square**0.5 for name, square in pooled.items()}


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return value if math.isfinite(value) else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Errors of the eager operator's choices beside the ones that lost.")
    parser.add_argument("--T", type=int, default=256, help="tokens of a sequence (default: 256)")
    T = parser.parse_args(argv).T
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for question, (choices, inputs, operand_dtype) in QUESTIONS.items():
        print(f"\n{question}\n{'inputs':<26}{'choice':<26}" + "".join(f"{name:>12}" for name in SHOWN))
        for label, options in inputs.items():
            for choice in choices:
                row = errors(choice, options, operand_dtype, T)
                result.setdefault(question, {}).setdefault(label, {})[choice[0]] = row
                print(f"{label:<26}{choice[0]:<26}" + "".join(f"{error:>12.1e}" for error in row.values()))
    # JSON has no NaN or infinity: an alternative that overflows is null there.
    print(json.dumps({"benchmark": "eager_choices", "T": T, "seeds": len(SEEDS), "relative_rms": finite(result)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
