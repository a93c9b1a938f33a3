"""What a KDA layer consists of, in plain Python: shared by the layers of every tensor library.

Shapes follow Kimi Linear checkpoints on disk; a linear weight is [out, in]. H query/key heads of width K, HV value
heads of width V, hidden size D, convolution width W.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The rate exp(A_log) of a new layer is uniform in this range, per value head.
RATE_RANGE = (1.0, 16.0)
#: softplus(dt_bias) of a new layer with the softplus gate: log-uniform in this range per channel, not below the floor.
STEP_RANGE = (1e-3, 1e-1)
STEP_FLOOR = 1e-4
#: Kept in fp32 whatever the layer's dtype, and free of weight decay: a changed rate changes every decay.
GATE_PARAMETERS = ("A_log", "dt_bias")


@dataclass(frozen=True)
class KDASizes:
    """The sizes of a KDA layer, checked.

    Raises: TypeError for a size that is no int; ValueError for one below 1, or heads that do not divide.
    """

    hidden_size: int  # D
    num_heads: int  # H
    num_v_heads: int  # HV
    head_dim: int  # K
    head_v_dim: int  # V
    conv_size: int  # W

    def __post_init__(self) -> None:
        op = "KimiDeltaAttention"
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{op}: {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{op}: {name} must be at least 1, got {value}")
        if self.num_v_heads % self.num_heads:
            raise ValueError(
                f"{op}: num_v_heads must be a multiple of num_heads = {self.num_heads}, got {self.num_v_heads}; "
                "every query/key head serves the same number of value heads"
            )

    @property
    def key_width(self) -> int:
        """Channels of q and of k: H * K."""
        return self.num_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Channels of the decay gate: HV * K."""
        return self.num_v_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of v and of the output gate: HV * V."""
        return self.num_v_heads * self.head_v_dim

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in the order of the layer."""
        D, W, keys, values = self.hidden_size, self.conv_size, self.key_width, self.value_width
        return {
            "A_log": (self.num_v_heads,),
            "dt_bias": (self.gate_width,),
            "q_proj.weight": (keys, D),
            "k_proj.weight": (keys, D),
            "v_proj.weight": (values, D),
            "q_conv1d.weight": (keys, 1, W),
            "k_conv1d.weight": (keys, 1, W),
            "v_conv1d.weight": (values, 1, W),
            "f_a_proj.weight": (self.head_dim, D),
            "f_b_proj.weight": (self.gate_width, self.head_dim),
            "b_proj.weight": (self.num_v_heads, D),
            "g_a_proj.weight": (self.head_v_dim, D),
            "g_b_proj.weight": (values, self.head_v_dim),
            "o_norm.weight": (self.head_v_dim,),
            "o_proj.weight": (D, values),
        }
