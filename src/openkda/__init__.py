"""Kimi Delta Attention for training: one operator, its layers and its models."""
