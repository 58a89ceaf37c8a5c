"""Storages are followed from birth to death."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from floorplan.layers.layer import model_state
from floorplan.ledger.storage import Life, StorageTracker, Timeline, bytes_of_tensors
from floorplan.torch_doors import storage_key, tensors_in


def life(born: int, died: int | None, nbytes: int) -> Life:
    return Life(born, nbytes, "n", "op", (nbytes,), torch.uint8, died)


def test_peak_is_the_most_alive_at_once() -> None:
    line = Timeline([life(0, 3, 10), life(1, 2, 5), life(4, None, 12)], events=5)
    assert line.peak() == 15
    assert line.peak([1, 2]) == 12
    assert Timeline().peak() == 0


def test_births_deaths_and_views() -> None:
    x = torch.ones(4)
    with StorageTracker([x]) as tracker:
        a = x + 1
        b = a.view(2, 2)
        del a
        assert len(tracker.alive) == 1
        del b
        c = x * 2
        x.add_(1)
    assert [(v.nbytes, v.op) for v in tracker.timeline.lives] == [(16, "aten.add.Tensor"), (16, "aten.mul.Tensor")]
    first, second = tracker.timeline.lives
    assert first.died is not None and first.died <= second.born and second.died is None
    assert storage_key(c) in tracker.alive and storage_key(x) not in tracker.alive


def test_backward_storages_are_named_by_the_node_that_made_theirs() -> None:
    x = torch.ones(4, requires_grad=True)
    with StorageTracker([x]) as tracker:
        tracker.enter("a")
        y = x.exp()
        tracker.enter("b")
        z = (y * y).sum()
        tracker.enter("end", "backward")
        assert tracker.maker_of(y.grad_fn._sequence_nr()) == "a"  # type: ignore[union-attr]
        assert tracker.maker_of(z.grad_fn._sequence_nr()) == "b"  # type: ignore[union-attr]
        assert tracker.maker_of(1 << 63) is None  # a leaf's own
        z.backward()
    found = [(v.node, v.direction, v.op.split(".")[1]) for v in tracker.timeline.lives]
    assert found == [
        ("a", "forward", "exp"),
        ("b", "forward", "mul"),
        ("b", "forward", "sum"),
        ("end", "backward", "ones_like"),
        ("b", "backward", "mul"),
        ("b", "backward", "mul"),
        ("b", "backward", "add"),
        ("a", "backward", "mul"),
    ]


def test_tensors_in_any_container() -> None:
    @dataclass
    class Out:
        maps: Tensor
        more: dict[str, list[Tensor]]

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = list(tensors_in(({"k": a}, 3, None, Out(b, {"m": [c]}))))
    assert [t.numel() for t in found] == [1, 2, 3]


def test_state_is_parameters_and_buffers() -> None:
    assert len(model_state(nn.BatchNorm2d(3))) == 5


def test_lives_born_at_one_event_are_alive_together() -> None:
    assert Timeline([life(0, 2, 10), life(0, None, 5)], events=2).peak() == 15


def test_events_are_numbered_one_by_one() -> None:
    x = torch.ones(4)
    with StorageTracker([x]) as tracker:
        a = x + 1
        b = x.sum(dtype=torch.float64)
        del a
        c = b * 2
        del b, c
    found = [(v.node, v.direction, v.born, v.died, v.shape, v.dtype) for v in tracker.timeline.lives]
    assert found == [
        ("", "forward", 0, 2, (4,), torch.float32),
        ("", "forward", 1, 4, (), torch.float64),
        ("", "forward", 3, 5, (), torch.float64),
    ]
    assert tracker.timeline.events == 6 and not tracker.alive


def test_the_backward_of_the_loss_is_the_losss() -> None:
    x = torch.ones(4, requires_grad=True)
    with StorageTracker([x]) as tracker:
        tracker.enter("a")
        y = x.exp()
        number = y.grad_fn._sequence_nr()  # type: ignore[union-attr]
        assert tracker.maker_of(number) is None  # the forward has not ended
        tracker.enter("loss", "loss")
        loss = y.square().sum()
        tracker.enter("end", "backward")
        assert tracker.maker_of(number) == "a"
        assert tracker.maker_of(x.exp().grad_fn._sequence_nr()) is None  # type: ignore[union-attr]
        loss.backward()
    made = [(v.node, v.direction) for v in tracker.timeline.lives]
    assert made[:3] == [("a", "forward"), ("loss", "loss"), ("loss", "loss")]
    assert made[-1] == ("a", "backward") and ("loss", "backward") in made


def test_the_number_of_steps_of_an_optimizer_is_no_matter_on_fakes() -> None:
    real = torch.tensor(3.0)
    with FakeTensorMode() as mode, StorageTracker() as tracker:
        fake = mode.from_tensor(real)
        with pytest.raises(DataDependentOutputException):
            fake.item()
        tracker.enter("adam", "optimizer")
        assert fake.item() == 1.0 and (fake + 1).shape == ()
    with StorageTracker() as tracker:
        tracker.enter("adam", "optimizer")
        assert real.item() == 3.0


def test_bytes_count_a_tensor_once() -> None:
    a, b = torch.zeros(3), torch.zeros(2, dtype=torch.float64)
    assert bytes_of_tensors([a, b, a]) == 12 + 16 and bytes_of_tensors([]) == 0
    assert bytes_of_tensors([a, a[:1]]) == 16  # a view is a tensor of its own


def test_a_node_stays_where_autograd_made_a_node_outside_of_the_graph() -> None:
    x = torch.ones(4, requires_grad=True)
    before = x.exp()  # nobody's
    with StorageTracker([x, before]) as tracker:
        number = before.grad_fn._sequence_nr()  # type: ignore[union-attr]
        tracker.enter("a")
        loss = before.square().sum()
        assert tracker.maker_of(number) is None and StorageTracker().maker_of(0) is None
        tracker.enter("end", "backward")
        loss.backward()
    assert {v.node for v in tracker.timeline.lives if v.direction == "backward"} <= {"a", "end"}


def test_the_device_of_a_fake_is_its_own() -> None:
    with FakeTensorMode() as mode, StorageTracker():
        fake = mode.from_tensor(torch.ones(3))
        assert torch.ops.prim.device.default(fake) == torch.device("cpu")
        with pytest.raises(Exception, match="device|argument|expected"):
            torch.ops.prim.device.default()
    assert torch.ops.prim.device.default(torch.ones(3)) == torch.device("cpu")
