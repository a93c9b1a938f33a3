"""Gluon as the kernels import it: Triton's own, or in Triton's interpreter what `gluon_interpreted` has in its place.

A module with Gluon kernels also imports `triton.language as tl`: the interpreter looks for it there.
"""

from openkda.kda.kernels.common import INTERPRETED

if INTERPRETED:
    from triton import jit

    from openkda.kda.kernels import gluon_interpreted as gl
    from openkda.kda.kernels.gluon_interpreted import (
        constexpr_function,
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
else:
    from triton.experimental.gluon import constexpr_function, jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

__all__ = [
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "mma_v2",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
