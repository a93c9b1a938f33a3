"""The command line: `openkda train`, `generate`, `convert`, `parity`, `bench`, `doctor`.

Nothing heavy is imported until a command runs.
"""
