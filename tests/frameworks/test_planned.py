"""Plans: workspaces that are alive at one time never share a byte, and those that are not do."""

import random

import pytest
import torch

from openkda import frameworks
from openkda.frameworks import torch as fw
from openkda.frameworks.planned import Planner, Signature

X = torch.zeros(64)
LIKE = Signature((64,), (1,), "float32", 0)


class Touch:
    """Checks that its buffers hold what was last written to them, and writes something new."""

    def __init__(self, *buffers):
        self.buffers = buffers

    def run(self, memories, stream):
        for buffer in self.buffers:
            tensor = memories[buffer.memory.index].view(buffer)
            for i, cell in enumerate(tensor.view(-1).tolist()):
                want = WRITTEN.get((buffer.memory.index, buffer.offset // 4 + i))
                assert want is None or want == cell
            values = torch.randint(1 << 20, tensor.shape, dtype=torch.int32)
            tensor.copy_(values)
            for i, value in enumerate(values.view(-1).tolist()):
                WRITTEN[buffer.memory.index, buffer.offset // 4 + i] = value


WRITTEN = {}


def run(planner):
    WRITTEN.clear()
    plan = planner.finish()
    return plan, plan.run(fw, (X,), lambda: None)


def workspaces(planner, like, *sizes):
    return [planner.empty((size,), like=like, dtype="int32") for size in sizes]


@pytest.fixture
def planner():
    return Planner(None)


@pytest.fixture
def like(planner):
    return planner.input(LIKE)


def test_workspaces_that_never_meet_share_memory(planner, like):
    a, b, c = workspaces(planner, like, 1024, 1024, 1024)
    planner.note(Touch(a, b))
    planner.note(Touch(b, c))
    assert run(planner)[0].nbytes == 8192


def test_half_a_workspace_is_free_when_it_is_done_with(planner, like):
    a, b = workspaces(planner, like, 2048, 1024)
    planner.note(Touch(a))
    planner.note(Touch(a[1024:]))
    planner.note(Touch(b, a[1024:]))
    assert run(planner)[0].nbytes == 8192


def test_a_result_lends_its_memory_until_it_is_written(planner, like):
    result = planner.result((1024,), "int32")
    a, b = workspaces(planner, like, 1024, 1024)
    planner.note(Touch(a))
    planner.note(Touch(result))
    planner.note(Touch(b))
    plan, (got,) = run(planner)
    assert plan.nbytes == 4096  # of b: the result must stay as it is
    assert got.tolist() == [WRITTEN[result.memory.index, i] for i in range(1024)]


def test_what_runs_beside_is_in_use_until_it_is_joined(planner, like):
    a, b, c = workspaces(planner, like, 1024, 1024, 1024)
    side = planner.beside(like)
    event = side.launch(lambda: planner.note(Touch(a)))
    planner.note(Touch(b))
    side.join(event)
    planner.note(Touch(c))
    assert run(planner)[0].nbytes == 8192


def test_a_view_has_the_place_of_its_slices(planner):
    x = torch.arange(120, dtype=torch.float32).view(4, 5, 6)[:, 1:]
    buffer = planner.input(Signature(*fw.signature(x)))
    part = buffer[1:3, 2]
    want = x[1:3, 2]
    assert (part.shape, part.strides) == (want.shape, want.stride())
    assert part.offset - buffer.offset == 4 * (want.storage_offset() - x.storage_offset())
    assert frameworks.of(part) is planner
    assert torch.equal(fw.view_bytes(x, part.offset - buffer.offset, part.shape, part.strides, "float32"), want)


@pytest.mark.parametrize("seed", range(20))
def test_no_workspace_is_overwritten_while_it_is_in_use(planner, like, seed):
    draw = random.Random(seed)
    results = [planner.result((draw.randrange(1, 600),), "int32") for _ in range(3)]
    buffers = workspaces(planner, like, *(draw.randrange(1, 600) for _ in range(12)))
    begins = [draw.randrange(20) for _ in buffers]
    ends = [begin + draw.randrange(6) for begin in begins]
    side, event = planner.beside(like), None
    for step in range(26):
        mine = [b for b, first, last in zip(buffers, begins, ends, strict=True) if first <= step <= last]
        cuts = [b[draw.randrange(b.shape[0]) :] if draw.random() < 0.3 else b for b in mine]
        mine = [r for i, r in enumerate(results) if step >= 6 * i + 3] + cuts
        if draw.random() < 0.2:
            side.join(event)
            event = side.launch(lambda mine=mine: planner.note(Touch(*mine)))
        else:
            planner.note(Touch(*mine))
    plan, _ = run(planner)
    assert plan.nbytes <= 4 * 12 * 640
