"""Triton kernels of the causal convolution, one pass a file; `tuning` holds their tile sizes."""
