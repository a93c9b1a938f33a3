"""openkda inside the tools people already train with. Thin, pinned to versions, no mathematics."""
