"""What a comparison found: plain data, which the terminal, the page and the JSON file show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from openkda.parity.metrics import Figures, Thresholds


@dataclass
class LayerReport:
    """One layer; errors are relative RMS. Router figures are None without experts."""

    index: int
    mixer: str
    ffn: str
    hidden_error: float
    stages: dict[str, float]
    first_stage: str | None
    """The first stage over the tolerance, in the order of computation."""
    expert_agreement: float | None = None
    """Share of the reference's (token, expert) pairs that our router chose too."""
    score_diff: float | None = None
    """Largest difference of a router score, which lies in (0, 1)."""
    tokens_rerouted: int | None = None
    nearest_tie: float | None = None
    """Smallest distance, over tokens, between the last expert chosen and the first one left out."""


@dataclass
class Tie:
    """A token whose experts differ, and by how little the reference itself decided."""

    layer: int
    prompt: str
    position: int
    piece: str
    gap: float
    reference: list[int]
    ours: list[int]


@dataclass
class Finding:
    """Something that rounding does not explain."""

    where: str
    error: float
    parameters: list[str]
    cause: str | None

    def sentence(self) -> str:
        cause = self.cause or "no known cause fits"
        names = f" [{', '.join(self.parameters)}]" if self.parameters else ""
        return f"{self.where}: {cause}; relative error {self.error:.2e}{names}"


@dataclass
class WorstToken:
    """One of the tokens whose predictions differ most."""

    prompt: str
    position: int
    before: str
    piece: str
    kl: float
    cos: float
    reference: list[str]
    ours: list[str]


@dataclass
class Gradient:
    """Relative RMS error of a parameter's gradient, and the norm of the reference's."""

    name: str
    error: float
    norm: float


@dataclass
class Packed:
    """All prompts in one packed row, against one by one. Errors are relative RMS, differences absolute."""

    logits_error: float
    max_diff: float
    figures: Figures
    gradient_error: float | None = None
    gradient_name: str | None = None


@dataclass
class Comparison:
    """Everything there is to report."""

    source: str
    dtype: str
    routing: str
    prompts: int
    tolerance: float
    last: Figures
    all: Figures
    notes: list[str]
    layers: list[LayerReport]
    ties: list[Tie]
    findings: list[Finding]
    worst: list[WorstToken]
    gradients: list[Gradient] = field(default_factory=list)
    packed: Packed | None = None
    rounding: Figures | None = None
    """The reference in bf16 against itself in fp32."""
    broken: list[str] = field(default_factory=list)

    def judge(self, thresholds: Thresholds) -> list[str]:
        """Sentences on the limits that are not kept; also kept in `broken`."""
        packed_errors = [] if self.packed is None else [self.packed.logits_error, self.packed.gradient_error or 0.0]
        self.broken = thresholds.broken(
            {
                "max_kl": self.all.kl,
                "max_mean_kl": self.all.mean_kl,
                "min_cos": self.all.cos,
                "max_diff": self.all.max_diff,
                "min_top1": 100 * self.all.top1,
                "min_top5": 100 * self.all.top5,
                "max_last_kl": self.last.kl,
                "max_grad_error": self.gradients[0].error if self.gradients else None,
                "max_packed_error": max(packed_errors, default=None),
            }
        )
        return self.broken

    @property
    def first_divergence(self) -> LayerReport | None:
        """The first layer that differs given equal inputs."""
        return next((layer for layer in self.layers if layer.first_stage), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers."""
        first = self.first_divergence
        return asdict(self) | {"first_divergence": None if first is None else [first.index, first.first_stage]}

    def text(self) -> str:
        """The comparison on a terminal; its last line is that of all tokens."""
        from openkda.parity.text import lines

        return "\n".join(lines(self))
