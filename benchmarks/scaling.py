"""Memory and traffic of Kimi Linear 48B-A3B on many H200s, calculated. `python benchmarks/scaling.py` prints tables.

A calculation, not a measurement; docs/scaling.md derives every formula and has the tables this prints. Bytes are for
one GPU and one training step (one forward and one backward of one sequence of T tokens in every context-parallel
group), with every block recomputed in the backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from openkda.integrations.torchtitan.builders import SIZES, Sizes

GB = 1e9
MEMORY = 141 * GB  # of an H200
NVLINK, NETWORK = 450 * GB, 50 * GB  # bytes a second, one way: fourth-generation NVLink; one 400 Gbit/s port a GPU
FLOPS = 0.4 * 989e12  # bf16, at a utilisation of 40%
NODE = 8  # GPUs with NVLink among them
BF16, FP32 = 2, 4
STATE = 16  # bytes a parameter: master, gradient and two moments, all fp32
GPUS, TOKENS = (8, 64, 512), (8_192, 131_072, 1_048_576)
TOKENS_A_RANK = 16_384  # what context parallelism aims at
MAX_CP = 64  # with fewer GPUs than that, all of them
EXPERT_RANKS = 8
LOSS_CHUNK = 2_048  # tokens whose logits exist at one time


@dataclass(frozen=True)
class Model:
    """Parameters by where they live, and sizes that traffic depends on."""

    sizes: Sizes

    @property
    def num_mla(self) -> int:
        return len(self.sizes.mla_layers)

    @property
    def num_kda(self) -> int:
        return self.sizes.num_layers - self.num_mla

    @property
    def num_moe(self) -> int:
        return self.sizes.num_layers - self.sizes.first_k_dense

    @property
    def width(self) -> int:
        """Channels of q, of k and of v in a KDA layer."""
        return self.sizes.num_heads * self.sizes.head_dim

    @property
    def embedding(self) -> int:
        return self.sizes.vocab_size * self.sizes.hidden_size

    @property
    def kda(self) -> int:
        """Of one KDA layer: q k v o, two low-rank gates, beta, convolutions, A_log, dt_bias, norm."""
        s, D, P, K = self.sizes, self.sizes.hidden_size, self.width, self.sizes.head_dim
        return 4 * D * P + 2 * (D * K + K * P) + D * s.num_heads + 3 * P * s.conv_kernel_size + s.num_heads + P + K

    @property
    def mla(self) -> int:
        s, D = self.sizes, self.sizes.hidden_size
        query, value = s.num_heads * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.num_heads * s.v_head_dim
        latent = s.kv_lora_rank + s.qk_rope_head_dim
        expand = s.kv_lora_rank * s.num_heads * (s.qk_nope_head_dim + s.v_head_dim)
        return D * query + D * latent + s.kv_lora_rank + expand + value * D

    @property
    def expert(self) -> int:
        return 3 * self.sizes.hidden_size * self.sizes.moe_intermediate_size

    @property
    def experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_moe * self.sizes.num_experts * self.expert

    @property
    def rest(self) -> int:
        """All but the routed experts."""
        s, D = self.sizes, self.sizes.hidden_size
        moe = self.num_moe * (s.num_shared_experts * self.expert + D * s.num_experts)
        dense = s.first_k_dense * 3 * D * s.intermediate_size
        norms = (2 * s.num_layers + 1) * D
        return 2 * self.embedding + self.num_kda * self.kda + self.num_mla * self.mla + moe + dense + norms

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with; looking up its embedding multiplies nothing."""
        return self.rest - self.embedding + self.num_moe * self.sizes.num_experts_per_token * self.expert


@dataclass(frozen=True)
class Run:
    """One way to train: FSDP over all GPUs, experts over EXPERT_RANKS of them, rows over cp."""

    model: Model
    gpus: int
    tokens: int
    """Of one sequence."""

    @property
    def cp(self) -> int:
        return min(self.gpus, MAX_CP, max(1, self.tokens // TOKENS_A_RANK))

    @property
    def local(self) -> int:
        """Tokens of a rank."""
        return self.tokens // self.cp

    # ---- memory
    @property
    def states(self) -> float:
        return STATE * (self.model.rest + self.model.experts) / self.gpus

    @property
    def gathered(self) -> float:
        """The block at work and the one that is fetched meanwhile, or the output matrix, in bf16."""
        m = self.model
        block = m.kda + 2 * m.expert + m.experts / m.num_moe / EXPERT_RANKS
        return BF16 * max(2 * block, block + m.embedding)

    @property
    def activations(self) -> float:
        """Inputs of all blocks, and what the widest block holds while it runs backward; see docs/scaling.md."""
        m, s = self.model, self.model.sizes
        kept = s.num_layers * s.hidden_size * BF16
        operator = s.num_heads * 4_500  # chunk_kda, forward and backward
        projections = 2 * 12 * m.width * BF16  # q k v before and after their convolution, gates, o; and gradients
        routed = s.num_experts_per_token * (2 * s.hidden_size + 3 * s.moe_intermediate_size) * 2 * BF16
        return self.local * (kept + operator + projections + routed)

    @property
    def keys_and_values(self) -> float:
        """Of the MLA layer at work: expanded keys and values of the whole sequence, and their gradients."""
        return 0.0 if self.cp == 1 else 2 * BF16 * self.tokens * self._kv_channels

    @property
    def logits(self) -> float:
        return min(LOSS_CHUNK, self.local) * self.model.sizes.vocab_size * (FP32 + BF16)

    @property
    def memory(self) -> float:
        return self.states + self.gathered + self.activations + self.keys_and_values + self.logits

    @property
    def _kv_channels(self) -> int:
        s = self.model.sizes
        return s.num_heads * (s.qk_nope_head_dim + s.qk_rope_head_dim + s.v_head_dim)

    # ---- traffic: bytes that a GPU receives
    @property
    def fsdp(self) -> float:
        """Parameters gathered twice in bf16, gradients reduced once in fp32."""
        per = 2 * BF16 + FP32
        replicas = self.gpus // EXPERT_RANKS
        experts = self.model.experts / EXPERT_RANKS * (1 - 1 / replicas)
        return per * (self.model.rest * (1 - 1 / self.gpus) + experts)

    @property
    def ep(self) -> float:
        """Tokens to their experts and back: forward, recomputed, backward."""
        s = self.model.sizes
        once = self.local * s.num_experts_per_token * s.hidden_size * BF16 * (1 - 1 / EXPERT_RANKS)
        return 2 * 3 * once * self.model.num_moe

    @property
    def sent_kda(self) -> int:
        """What a rank sends in one KDA layer and direction: (M, b) of two parts, zig-zag."""
        s = self.model.sizes
        return 0 if self.cp == 1 else 2 * s.num_heads * s.head_dim * 2 * s.head_dim * FP32

    @property
    def cp_kda(self) -> float:
        """Maps of all other ranks, and W-1 inputs of q, k and v: forward, recomputed, backward."""
        halo = 0 if self.cp == 1 else 2 * 3 * (self.model.sizes.conv_kernel_size - 1) * self.model.width * BF16
        return 3 * (self.cp - 1) * (self.sent_kda + halo) * self.model.num_kda

    @property
    def cp_mla(self) -> float:
        """Keys and values of all other tokens, forward and recomputed; their gradients, backward."""
        return 3 * BF16 * self.tokens * (1 - 1 / self.cp) * self._kv_channels * self.model.num_mla

    # ---- time
    @property
    def compute_s(self) -> float:
        """At 40% utilisation, with the forward of every block twice."""
        m, s = self.model, self.model.sizes
        attention = m.num_mla * self._kv_channels * self.tokens  # 2 multiply-adds of half the tokens, on average
        recurrence = m.num_kda * 6 * s.num_heads * s.head_dim**2
        return 4 * (2 * m.active + attention + recurrence) * self.local / FLOPS

    def seconds(self, received: float, ranks: int) -> float:
        """Time to receive: over NVLink where all ranks of the group are in one node."""
        return received / (NVLINK if ranks <= NODE else NETWORK)

    @property
    def network_s(self) -> dict[str, float]:
        return {
            "fsdp": self.seconds(self.fsdp, self.gpus),
            "ep": self.seconds(self.ep, EXPERT_RANKS),
            "cp_kda": self.seconds(self.cp_kda, self.cp),
            "cp_mla": self.seconds(self.cp_mla, self.cp),
        }


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def amount(value: float) -> str:
    """Three digits, or 0."""
    if value == 0 or value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}"


def runs() -> list[Run]:
    model = Model(SIZES["48B-A3B"])
    return [Run(model, gpus, tokens) for gpus in GPUS for tokens in TOKENS]


LAYOUT = ["GPUs", "T", "CP", "tokens a GPU"]


def name(run: Run) -> list[str]:
    length = f"{run.tokens // 1024}k" if run.tokens < 1 << 20 else f"{run.tokens >> 20}M"
    return [str(run.gpus), length, str(run.cp), f"{run.local // 1024}k"]


def memory_table() -> str:
    header = [*LAYOUT, "states", "gathered", "activations", "K and V of MLA", "logits", "sum", "fits"]
    rows = []
    for run in runs():
        parts = [run.states, run.gathered, run.activations, run.keys_and_values, run.logits, run.memory]
        rows.append([*name(run), *(amount(x / GB) for x in parts), "yes" if run.memory < MEMORY else "no"])
    return table(header, rows)


def traffic_table() -> str:
    header = [*LAYOUT, "FSDP", "EP", "KDA", "MLA", "compute, s", "FSDP, s", "EP, s", "KDA, s", "MLA, s"]
    rows = []
    for run in runs():
        received = [run.fsdp, run.ep, run.cp_kda, run.cp_mla]
        times = [run.compute_s, *run.network_s.values()]
        rows.append([*name(run), *(amount(x / GB) for x in received), *(amount(t) for t in times)])
    return table(header, rows)


def main() -> None:
    model = Model(SIZES["48B-A3B"])
    total = model.rest + model.experts
    print(f"parameters: {total / GB:.2f} billion, {model.active / GB:.2f} billion a token multiplies\n")
    print("Memory of a GPU, GB\n\n" + memory_table() + "\n")
    print("Received by a GPU in a step, GB, and seconds\n\n" + traffic_table())


if __name__ == "__main__":
    main()
