"""Triton kernels of chunk_kda, one stage a file; `kda/stages.py` calls them in order, `docs/maths.md` derives them."""
