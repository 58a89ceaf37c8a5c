"""The paper's backbones: sizes, shapes, tracing, and the bytes that full fine-tuning keeps."""

import pytest
import torch
from example import factory, window
from torch import Tensor, fx, nn


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Distinct storages kept for backward, model state and the caller's input apart."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"), [("t_resnet", (97, 60), 560_915), ("mobilenet_v2", (1, 97, 60), 2_245_649)]
)
def test_size_and_shape(name: str, shape: tuple[int, ...], parameters: int) -> None:
    model = factory(name)()
    assert model.example_input_shape == shape
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.requires_grad for p in model.parameters())
    assert model.training
    assert model(window(model, 2)).shape == (2, 17)


@pytest.mark.parametrize("name", ["t_resnet", "mobilenet_v2"])
@pytest.mark.parametrize("train", [True, False])
def test_traced_graph_computes_the_same(name: str, train: bool) -> None:
    model = factory(name)().train(train)
    x = window(model, 2)
    gm = fx.symbolic_trace(model)
    assert gm.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(gm(x), model(x))


@pytest.mark.parametrize(
    ("name", "slope", "constant"), [("t_resnet", 746_124, 12_552), ("mobilenet_v2", 9_990_800, 136_448)]
)
@pytest.mark.parametrize("batch", [2, 3])
def test_full_fine_tuning_keeps(name: str, slope: int, constant: int, batch: int) -> None:
    model = factory(name)()
    assert saved_bytes(model, window(model, batch)) == slope * batch + constant


@pytest.mark.parametrize("name", ["t_resnet", "mobilenet_v2"])
def test_seeded_without_touching_the_random_state(name: str) -> None:
    state = torch.get_rng_state()
    first, second, other = (factory(name)(seed=s).state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


def test_mobilenet_names_follow_torchvision() -> None:
    keys = factory("mobilenet_v2")().state_dict().keys()
    assert {
        "features.0.0.weight",
        "features.1.conv.0.0.weight",  # no expansion: depthwise first
        "features.1.conv.1.weight",
        "features.2.conv.0.1.running_var",
        "features.2.conv.3.bias",
        "features.18.0.weight",
        "classifier.1.weight",
    } <= keys
    assert sum(k.endswith("num_batches_tracked") for k in keys) == 52


def test_dropout_is_off_unless_asked_for() -> None:
    model = factory("mobilenet_v2")(dropout=0.5)
    assert model.classifier[0].p == 0.5
    assert factory("mobilenet_v2")().classifier[0].p == 0.0
