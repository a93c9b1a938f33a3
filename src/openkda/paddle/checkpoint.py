"""Weights between Paddle and everybody else, as safetensors files in the layout of torch and of checkpoints on disk.

Names are equal on both sides. Three things differ, and are turned here alone: a Paddle linear keeps its weight as
[in, out], torch as [out, in]; a checkpoint may hold A_log as [1, 1, HV, 1] and dt_bias as [HV, K]; and what a file
holds in 16 bits becomes fp32 where the layer has fp32.

    checkpoint.save(model, "model.safetensors")          # torch: load_state_dict(safetensors.torch.load_file(..))
    checkpoint.load(model, "model.safetensors")
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import paddle
from paddle import Tensor, nn

from openkda.nn import _rules


def state_dict(model: nn.Layer) -> dict[str, Tensor]:
    """The weights of a model in torch's layout: contiguous copies, detached."""
    turned = _linear_weights(model)
    return {
        name: paddle.transpose(value.detach(), [1, 0]).contiguous() if name in turned else value.detach().clone()
        for name, value in model.state_dict().items()
    }


def load_state_dict(model: nn.Layer, weights: Mapping[str, Tensor]) -> None:
    """Copy weights in torch's layout into a model.

    Raises: KeyError for a name that is missing or has no place; ValueError for a shape that does not fit.
    """
    own, turned = model.state_dict(), _linear_weights(model)
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise KeyError(f"load_state_dict: weights must have the model's names, missing {missing}, unknown {unknown}")
    ready = {name: _fit(name, weights[name], own[name], name in turned) for name in own}
    with paddle.no_grad():  # nothing is written before all fit
        for name, value in ready.items():
            own[name].set_value(value)


def save(model: nn.Layer, path: str | os.PathLike[str]) -> None:
    """Write a model's weights to a safetensors file."""
    from safetensors.paddle import save_file

    save_file(state_dict(model), path)


def load(model: nn.Layer, path: str | os.PathLike[str]) -> None:
    """Read a model's weights from a safetensors file.

    Raises: as `load_state_dict`.
    """
    from safetensors.paddle import load_file

    load_state_dict(model, load_file(path))


def _linear_weights(model: nn.Layer) -> set[str]:
    """Names of the weights that Paddle keeps as [in, out]."""
    linears = [name for name, layer in model.named_sublayers(include_self=True) if isinstance(layer, nn.Linear)]
    return {f"{name}.weight" if name else "weight" for name in linears}


def _fit(name: str, value: Tensor, own: Tensor, turned: bool) -> Tensor:
    if turned and value.ndim == 2:
        value = paddle.transpose(value, [1, 0])
    gate = name.rpartition(".")[2] in _rules.GATE_PARAMETERS
    if gate and math.prod(value.shape) == math.prod(own.shape):
        value = paddle.reshape(value, own.shape)
    if tuple(value.shape) != tuple(own.shape):
        want, got = (list(x.shape[::-1] if turned else x.shape) for x in (own, value))
        raise ValueError(f"load_state_dict: {name} must have shape {want}, got {got}")
    return value.astype(own.dtype)
