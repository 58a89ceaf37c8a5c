"""Weights fit entirely or not at all, and whatever was done to the keys is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from floorplan.errors import LoadError
from floorplan.store.load import load_weights


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + k: v for k, v in state.items()}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("key", ["", "state_dict", "model", "model_state_dict", "net"])
def test_torch_files(tmp_path: Path, new: bool, key: str) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.pth")
    found = {key: source.state_dict(), "epoch": 3} if key else source.state_dict()
    torch.save(found, path, _use_new_zipfile_serialization=new)
    notes = load_weights(target, path)
    assert notes == ((f"took the weights under the key {key!r}",) if key else ())
    assert same(source, target)


def test_safetensors(tmp_path: Path) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.safetensors")
    save_file(source.state_dict(), path)
    assert load_weights(target, path) == ()
    assert same(source, target)


@pytest.mark.parametrize(
    ("prefix", "notes"),
    [
        ("module.", ("stripped the 'module.' prefix of 7 keys",)),
        ("_orig_mod.", ("stripped the '_orig_mod.' prefix of 7 keys",)),
        (
            "_orig_mod.module.",
            ("stripped the '_orig_mod.' prefix of 7 keys", "stripped the 'module.' prefix of 7 keys"),
        ),
    ],
)
def test_prefixes_are_stripped_and_said(tmp_path: Path, prefix: str, notes: tuple[str, ...]) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.pt")
    torch.save(prefixed(source.state_dict(), prefix), path)
    assert load_weights(target, path) == notes
    assert same(source, target)


@pytest.mark.parametrize(
    "prefix", ["model.", "net.", "module.model.", "_orig_mod.module.net.", "student.encoder.", "0."]
)
def test_any_common_prefix_is_stripped_and_said(tmp_path: Path, prefix: str) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.pt")
    torch.save({"state_dict": prefixed(source.state_dict(), prefix), "epoch": 3}, path)
    said = [f"stripped the '{part}.' prefix of 7 keys" for part in prefix[:-1].split(".")]
    assert list(load_weights(target, path)) == ["took the weights under the key 'state_dict'", *said]
    assert same(source, target)


def test_a_prefix_that_the_model_has_stays(tmp_path: Path) -> None:
    path, wrapped = str(tmp_path / "w.pt"), nn.ModuleDict({"net": nn.ModuleDict({"net": net(2)})})
    torch.save(nn.ModuleDict({"net": nn.ModuleDict({"net": net(1)})}).state_dict(), path)
    assert load_weights(wrapped, path) == ()
    assert same(nn.ModuleDict({"net": net(1)}), wrapped["net"])


def test_what_stands_beside_the_models_prefix_is_left_out_aloud(tmp_path: Path) -> None:
    """A Lightning module holds losses and copies beside the model."""
    source, target, path = net(1), net(2), str(tmp_path / "w.ckpt")
    state = prefixed(source.state_dict(), "model.") | {"loss.weight": torch.ones(3)}
    torch.save({"state_dict": state | prefixed(net(3).state_dict(), "e."), "loops": {}}, path)
    _, note = load_weights(target, path)
    assert note == "took the 7 weights that fit and left out 8 keys beside them (loss.weight, e.0.weight, e.0.bias, …)"
    assert same(source, target)


@pytest.mark.parametrize("inside", [lambda m: m, nn.DataParallel])
def test_an_averaged_model(tmp_path: Path, inside: Any) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.pt")
    state = torch.optim.swa_utils.AveragedModel(inside(source)).state_dict()
    for found in (state, {"model_ema": state, "epoch": 1}):
        torch.save(found, path)
        notes = load_weights(target, path)
        assert "left out n_averaged, the counter of an averaged model" in notes
        assert "stripped the 'module.' prefix of 7 keys" in notes and same(source, target)


NAMES = ["ema", "model_ema", "state_dict_ema", "params", "params_ema", "weights", "network", "module", "anything"]


@pytest.mark.parametrize("key", NAMES)
def test_weights_under_the_names_of_training_scripts(tmp_path: Path, key: str) -> None:
    source, target, path = net(1), net(2), str(tmp_path / "w.pt")
    torch.save({"step": 3, "optimizer": {"state": {}}, key: source.state_dict()}, path)
    assert load_weights(target, path) == (f"took the weights under the key {key!r}",) and same(source, target)
    torch.save({"checkpoint": 1, "state_dict": {key: source.state_dict(), "lr": 0.1}}, path)
    assert len(load_weights(target, path)) == 2 and same(source, target)


def test_of_two_sets_of_weights_the_trained_ones_are_taken_and_the_others_named(tmp_path: Path) -> None:
    target, path = net(2), str(tmp_path / "w.pt")
    torch.save({"state_dict_ema": net(3).state_dict(), "state_dict": net(1).state_dict()}, path)
    (note,) = load_weights(target, path)
    assert note == "took the weights under the key 'state_dict'; the file has 'state_dict_ema' too"
    assert same(net(1), target)
    torch.save({"a": net(3).state_dict(), "b": net(1).state_dict()}, path)
    with pytest.raises(LoadError, match="holds a dict, but not a state_dict"):
        load_weights(target, path)


def test_a_head_of_another_size_keeps_the_models_own_if_asked(tmp_path: Path) -> None:
    def model(classes: int, seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, classes))

    target, path, source = model(5, 2), str(tmp_path / "w.pt"), model(1000, 1).state_dict()
    own = {k: v.clone() for k, v in target.state_dict().items()}
    torch.save(prefixed(source, "model."), path)
    with pytest.raises(LoadError, match=r"2 keys of another shape \(2.weight .*; --keep-head keeps the model's own$"):
        load_weights(target, path)
    assert all(torch.equal(t, own[k]) for k, t in target.state_dict().items())
    notes = load_weights(target, path, keep_head=True)
    assert notes[-1] == "kept the model's own 2.weight (1000 in the file, 5 here), 2.bias (1000 in the file, 5 here)"
    for k, t in target.state_dict().items():
        assert torch.equal(t, own[k] if k.startswith("2") else source[k])
    # Another width is no other head.
    torch.save(own | {"0.weight": torch.ones(4, 2, 3, 3)}, path)
    for keep in (False, True):
        with pytest.raises(LoadError, match=r"1 key of another shape \(0.weight \[4, 2, 3, 3\] for \[4, 3, 3, 3\]\)$"):
            load_weights(target, path, keep_head=keep)


def test_a_compiled_submodule_and_a_models_own_module_prefix(tmp_path: Path) -> None:
    path = str(tmp_path / "w.pt")
    state = {k.replace("0.", "0._orig_mod."): v for k, v in net(1).state_dict().items()}
    torch.save(state, path)
    target = net(2)
    assert load_weights(target, path) == ("stripped '_orig_mod.' inside 2 keys",)
    assert same(net(1), target)
    wrapped = nn.ModuleDict({"module": net(2)})
    torch.save(nn.ModuleDict({"module": net(1)}).state_dict(), path)
    assert load_weights(wrapped, path) == ()
    assert same(net(1), wrapped["module"])


def test_old_files_without_counters_and_half_precision(tmp_path: Path) -> None:
    path, target = str(tmp_path / "w.pt"), net(2)
    state = {k: v for k, v in net(1).state_dict().items() if "num_batches" not in k}
    torch.save({k: v.half() for k, v in state.items()}, path)
    assert load_weights(target, path) == (
        "the file has no num_batches_tracked: 1 keep their value",
        "cast 6 tensors to the model's precision (float16 to float32)",
    )
    assert torch.equal(target.state_dict()["1.running_var"], net(1).state_dict()["1.running_var"])


def test_a_whole_model_serves_as_weights(tmp_path: Path) -> None:
    path, target = str(tmp_path / "w.pt"), net(2)
    torch.save({"model": net(1)}, path)
    notes = load_weights(target, path)
    assert "took the weights of the Sequential saved in the file" in notes
    assert same(net(1), target)


def change(**entries: object) -> dict[str, object]:
    state: dict[str, object] = dict(net(1).state_dict())
    for key, value in entries.items():
        name = key.replace("_", ".", 1)
        state.pop(name, None)
        if value is not None:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (change(**{"0_weight": None}), "1 key missing (0.weight)"),
        (change(**{"9_x": torch.ones(1), "9_y": torch.ones(1)}), "2 keys unexpected (9.x, 9.y)"),
        (change(**{"0_bias": torch.ones(5)}), "1 key of another shape (0.bias [5] for [4])"),
        (change(**{"0_bias": torch.ones(4).int()}), "1 key of another kind of number (0.bias)"),
        ({"9.y": torch.ones(1), "8.z": torch.ones(1)}, "6 keys missing (0.weight, 0.bias, 1.weight, …)"),
        (change(**{"0_bias": 3}), "'0.bias' is a int, not a tensor"),
        ({}, "empty state_dict"),
        ([1, 2], "holds a list, not a state_dict"),
        ({"epoch": 1}, "'epoch' is a int"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(tmp_path: Path, found: object, says: str) -> None:
    path, target = str(tmp_path / "w.pt"), net(2)
    torch.save(found, path)
    with pytest.raises(LoadError) as caught:
        load_weights(target, path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same(target, net(2))


def test_meta_models_take_no_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "w.pt")
    torch.save(net(1).state_dict(), path)
    with pytest.raises(LoadError, match="meta device"):
        load_weights(net(2).to("meta"), path)


def test_other_files_are_refused_as_weights(tmp_path: Path) -> None:
    (tmp_path / "w.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "w.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0" + b'{"x":')
    for name, says in [("w.npy", "NumPy"), ("w.safetensors", "safetensors"), ("no", "no such")]:
        with pytest.raises(LoadError, match=says):
            load_weights(net(), str(tmp_path / name))
