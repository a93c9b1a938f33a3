"""What `openkda bench` measures: the operator and the layer, beside every other implementation that can be imported.

    op.py, layer.py   what is measured, in the process of one row
    peers.py          the other implementations of the operator, one adapter class each
    measure.py        times, CUDA graphs, memory, kernels
    row.py            one row, one process: what goes wrong there ends as a reason in the table
    report.py         table, Markdown, summary; plot.py: time and memory against T

A row measures openkda and one peer in turns, so the ratio of the two does not depend on what else the machine did.
"""
