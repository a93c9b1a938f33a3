"""What a KDA layer remembers between calls while decoding: constant in size, however long the text."""

from __future__ import annotations

from typing import Any, NamedTuple

from openkda import frameworks


class KDALayerState(NamedTuple):
    """The state of one layer for N sequences."""

    q_conv: Any  # [N, H*K, W-1]   last inputs of each convolution, oldest first, in their dtype
    k_conv: Any  # [N, H*K, W-1]
    v_conv: Any  # [N, HV*V, W-1]
    recurrent: Any  # [N, HV, K, V]  fp32

    def select(self, index: Any) -> KDALayerState:
        """The sequences named by index (int64 `[N']`), in its order."""
        return KDALayerState(*(frameworks.of(x).take(x, index, 0) for x in self))


class KDABlockStates(NamedTuple):
    """The state of one layer with batch_invariant=True: a `nn.blocks.BlockState` of every sequence."""

    sequences: tuple[Any, ...]

    def select(self, index: Any) -> KDABlockStates:
        """The sequences named by index (int64 `[N']`), in its order; reads it on the host."""
        return KDABlockStates(tuple(self.sequences[n] for n in frameworks.of(index).to_list(index)))


class KDACache:
    """The states of all KDA layers of a model, by layer index; give the same object to every call.

        cache = KDACache()
        y = layer(prompt, cache=cache)       # [B, T, D]: fills the cache
        y = layer(next_token, cache=cache)   # [B, 1, D]: reads and replaces it

    A call either replaces the states of its layer or, when it raises, leaves them as they were.
    """

    def __init__(self) -> None:
        self.states: dict[int, KDALayerState | KDABlockStates] = {}

    def __len__(self) -> int:
        return len(self.states)

    def get(self, layer_idx: int) -> Any | None:
        """The state of a layer, a KDALayerState or KDABlockStates; None before its first call."""
        return self.states.get(layer_idx)

    def set(self, layer_idx: int, state: KDALayerState | KDABlockStates) -> None:
        """Replace the state of a layer."""
        self.states[layer_idx] = state

    def select(self, index: Any) -> None:
        """Keep the sequences named by index (int64 `[N']`), in its order: beam search, or dropping what has ended."""
        for layer_idx, state in self.states.items():
            self.states[layer_idx] = state.select(index)

    def reset(self) -> None:
        """Forget everything."""
        self.states.clear()
