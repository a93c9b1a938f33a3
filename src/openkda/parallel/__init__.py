"""Context parallelism: one packed row of tokens spread over the ranks of a group.

    layout.py    which rank holds which tokens, and where sequences are cut: plain Python, no tensors
    context.py   `build_cp_context`: the layout of one step, seen from one rank
    states.py    states of local pieces from states of whole sequences, and back

The operators' own parts are in `kda/context_parallel.py` and `conv/context_parallel.py`.
"""
