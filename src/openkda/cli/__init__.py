"""The command line: `openkda train`, `generate`, `doctor`. Nothing heavy is imported until a command runs."""
