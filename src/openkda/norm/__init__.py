"""Normalisation of q and k, and of the operator's output: reference.py defines them, eager.py runs them anywhere."""

from openkda.norm.api import l2norm, rms_norm_gated

__all__ = ["l2norm", "rms_norm_gated"]
