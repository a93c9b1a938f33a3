"""The shapes that benchmarks run at; one list, so that figures can be compared across files and over time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """B batch, T tokens, H query/key heads, HV value heads, K and V channels of a head."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    def __str__(self) -> str:
        return f"B{self.B}_T{self.T}_H{self.H}_HV{self.HV}_K{self.K}_V{self.V}"


SHAPES = {
    "cpu": Shape(
        B=1, T=2048, H=4, HV=4, K=64, V=64
    ),  # what two CPU cores can train: long enough to be dominated by the scan
    "cpu-small": Shape(B=1, T=256, H=2, HV=2, K=32, V=32),  # a quick look
}
