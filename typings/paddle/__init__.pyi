# Paddle is optional and brings no types: for a type checker it is a module of anything. Without this stub pyright takes
# src/openkda/paddle for it.
from typing import Any

def __getattr__(name: str) -> Any: ...
