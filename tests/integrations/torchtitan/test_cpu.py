"""The CPU workarounds: that they work, and that each is still needed. A failure here means one can go from cpu.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components import metrics
from torchtitan.distributed import utils as titan_distributed
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils

from openkda.integrations.torchtitan import cpu

on_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture
def gloo():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@on_cpu
def test_install_names_the_device_in_every_module_however_late_it_is_called() -> None:
    cpu.install()
    cpu.install()
    assert titan_utils.device_type == metrics.device_type == titan_distributed.device_type == "cpu"
    assert isinstance(metrics.device_module, cpu.CPUDevice)


@on_cpu
def test_memory_monitor_reports_the_process() -> None:
    monitor = metrics.build_device_memory_monitor()
    assert 0.05 < monitor.get_peak_stats().max_reserved_gib < monitor.device_capacity_gib


@on_cpu
def test_peak_flops_of_a_cpu_are_not_those_of_a_gpu() -> None:
    assert titan_utils.get_peak_flops("CPU") == float("inf")


class OneMesh:
    def get_all_one_dimensional_meshes(self) -> dict:
        return {}


@on_cpu
@pytest.mark.usefixtures("gloo")
def test_process_group_timeout_can_be_changed() -> None:
    titan_distributed.set_pg_timeouts(timedelta(seconds=77), OneMesh())
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=77)


def test_torch_still_has_no_set_timeout() -> None:
    assert not hasattr(dist, "set_timeout")


@on_cpu
@pytest.mark.usefixtures("gloo")
def test_gloo_still_has_no_premultiplied_sum() -> None:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(1.0))


@on_cpu
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_still_refuses_inputs_that_need_a_gradient_on_a_cpu() -> None:
    q, k, v = (torch.randn(1, 1, 16, 16, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="CPU"):
        flex_attention(q, k, v)


@on_cpu
def test_autocast_to_fp32_still_warns_on_a_cpu() -> None:
    with pytest.warns(UserWarning, match="In CPU autocast"), torch.autocast("cpu", dtype=torch.float32):
        pass


def test_torch_cpu_still_lacks_what_torchtitan_asks_of_a_device() -> None:
    assert not hasattr(torch.cpu, "memory_stats")


def test_block_causal_mask_is_causal_inside_a_document_and_empty_between_documents() -> None:
    mask = cpu.block_causal_mask(torch.tensor([[0, 1, 0, 1], [3, 4, 5, 0]]))
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]


def test_masked_attention_equals_softmax_by_hand() -> None:
    attention = cpu.MaskedAttention.Config().build()
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 6, 3, 8), torch.randn(2, 6, 3, 5)
    mask = cpu.block_causal_mask(torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]))
    out = attention(q, k, v, attention_masks=mask, scale=0.3)
    scores = torch.einsum("blnh,bmnh->bnlm", q, k) * 0.3
    expected = torch.einsum("bnlm,bmnv->blnv", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(attention(q, k, v, scale=0.3)[1], expected[1])


# ---------------------------------------------------------------- sharded random numbers
class Weight(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 3))
        self._param_init = {"weight": torch.nn.init.normal_}


def drawn_by(rank: int, init: Callable[..., None]) -> torch.Tensor:
    """What one of two ranks holds of a weight that is split over them; the other rank is not there."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        module = Weight()
        shard = torch.empty(4, 3)
        module.weight = torch.nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
        torch.manual_seed(0)
        with torch.no_grad():
            init(module, "weight", module.weight)
        return module.weight.to_local().detach()
    finally:
        dist.destroy_process_group()


@on_cpu
def test_a_split_weight_starts_as_the_whole_one_does() -> None:
    torch.manual_seed(0)
    whole = torch.nn.init.normal_(torch.empty(8, 3))
    assert torch.equal(drawn_by(1, Module._init_param), whole[4:])


@on_cpu
def test_drawing_parts_of_a_weight_still_gives_equal_parts() -> None:
    def by_parts(module: Module, name: str, parameter: torch.nn.Parameter) -> None:
        module._param_init[name](parameter)

    first, second = (drawn_by(rank, by_parts) for rank in (0, 1))
    assert torch.equal(first, second)
