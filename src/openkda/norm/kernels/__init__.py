"""Triton kernels of the two normalisations, forward beside backward; `tuning` holds their tile sizes."""
