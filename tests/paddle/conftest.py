"""Tests of the Paddle side. They run in an environment with Paddle and torch (`make test-paddle`); elsewhere there is
nothing to collect.
"""

import importlib.util
import warnings

import pytest

if importlib.util.find_spec("paddle") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no ccache; protobuf: of Paddle's own import (3.3.1)
        import paddle

    @pytest.fixture(autouse=True)
    def fixed_paddle_seed() -> None:
        paddle.seed(0)
