"""Pipeline parallelism: torchtitan's, with the step of a schedule that torchtitan 0.3.0 expects.

torchtitan hands a schedule its micro-batches one by one (`arg_mbs`, `kwarg_mbs`, `target_mbs`), as nightly builds of
torch take them; torch up to 2.13 knows whole batches only, but has the same loop inside. Can go with the first torch
release whose schedules take micro-batches.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm


def pipeline_kimi_linear(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """torchtitan's pipelining function."""
    schedule, *rest = pipeline_llm(*args, **kwargs)
    _leave_counts_alone(schedule)
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        schedule.step = functools.partial(_step, schedule)
    return (schedule, *rest)


def _stages(schedule: Any) -> list[Any]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def _leave_counts_alone(schedule: Any) -> None:
    """Before its first step, and when validation begins or ends, a schedule runs a forward to learn shapes. Tokens that
    experts get there are none: counted, they would move the experts' bias.
    """
    name = "_initialize_stages" if hasattr(schedule, "_initialize_stages") else "_initialize_stage"
    initialize = getattr(schedule, name)

    def initialize_and_restore(*args: Any, **kwargs: Any) -> Any:
        buffers = [named for stage in _stages(schedule) for named in stage.submod.named_buffers()]
        counts = [(buffer, buffer.clone()) for name, buffer in buffers if name.endswith("tokens_per_expert_E")]
        result = initialize(*args, **kwargs)
        for buffer, before in counts:
            buffer.copy_(before)
        return result

    setattr(schedule, name, initialize_and_restore)


def _step(
    schedule: Any,
    *,
    arg_mbs: list[tuple[Any, ...]] | None,
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    losses: list[Any] | None = None,
    loss_kwargs: dict[str, Any] | None = None,
    return_outputs: bool = False,
    target: None = None,
) -> None:
    """One step over micro-batches; forward only where the schedule has no backward (`eval`)."""
    for stage in _stages(schedule):
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    arguments = arg_mbs or [()] * len(kwarg_mbs)
    schedule._step_microbatches(arguments, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
