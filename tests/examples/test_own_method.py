"""A method from outside through everything, and what is said of one that does not fit."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_method
import pytest
import torch
from own_method import METHOD, XsConv
from saves import close, drawn
from torch import nn

import floorplan
from floorplan.errors import FloorplanError, LoadError
from floorplan.layers.adapter import adapters
from floorplan.ledger.macs import layers_of, merges_of
from floorplan.methods import catalogue
from floorplan.methods.merge import merge_verified
from floorplan.methods.merge_file import delta_state
from floorplan.methods.verify import randomize_adapters
from tests.cli.test_main import RESIDUAL, SIZE, run

SMALL = Path(__file__).parents[1] / "nets" / "small.py"
X = torch.randn(8, 3, 16, 16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 5),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(catalogue, "_REGISTERED", {})
    floorplan.register(METHOD)
    yield
    catalogue._outside.cache_clear()


def rewritten() -> Any:
    gm = floorplan.rewrite(net(), X, rank=2, method="lora-xs", measured=False).module
    randomize_adapters(gm)
    return gm.eval()


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own_method.main()
    out = capsys.readouterr().out
    assert "verdict: AT_FLOOR" in out and "Conv2d(16, 32" in out and "XsConv" not in out.partition("GraphModule")[2]
    assert len(Path(own_method.__file__).read_text().splitlines()) <= 60


def test_its_proof_and_its_bytes() -> None:
    report = floorplan.check(net(), X, rank=2, method="lora-xs", measured=True)
    assert report.verdict == "AT_FLOOR" and set((report.difference or {}).values()) == {0}
    entries = [e for e in report.proof.kept if e.op == "XsConv"]
    t = [e for e in entries if "B" in e.shape]
    assert [e.shape[:2] for e in t] == [("B", "r")] * 2 and not any(e.width_symbols for e in t)
    assert [e.expr.rpartition("*")[0] for e in t] == ["4*B*r*H1", "4*B*r*H2"]
    assert [e.nbytes for e in t] == [4 * 8 * 2 * 14 * 14, 4 * 8 * 2 * 5 * 5]
    assert {e.pillar for e in entries} == {"adapter"} and len(entries) == 4  # t and the small product B R
    after = floorplan.rewrite(net(), X, rank=3, method="lora-xs").report.after
    assert (
        set((after.difference or {}).values()) == {0} and after.predicted.trainable_parameters == 3 * 3
    )  # three inputs are no wider


@pytest.mark.parametrize(
    "conv,shape",
    [
        (nn.Conv1d(6, 8, 5, stride=2, padding=2), (6, 17)),
        (nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (4, 9, 8)),
        (nn.Conv3d(3, 4, (1, 2, 3), dilation=2, bias=False), (3, 4, 5, 6)),
    ],
    ids=str,
)
def test_gradients_are_those_of_plain_autograd(conv: Any, shape: tuple[int, ...]) -> None:
    layer: Any = XsConv.of(copy.deepcopy(conv).double(), 3, torch.Generator())
    nn.init.normal_(layer.R)
    x = drawn(2, *shape).requires_grad_()
    y = layer(x)
    g = drawn(*y.shape)
    got = torch.autograd.grad(y, [x, layer.R], g)
    layer.plain = True
    want = layer(x)
    close(y, want)
    for found, wanted in zip(got, torch.autograd.grad(want, [x, layer.R], g), strict=True):
        close(found, wanted)


def test_the_frozen_factors_are_the_best_of_their_rank() -> None:
    layer: Any = XsConv.of(nn.Conv2d(4, 6, 3), 2, torch.Generator())
    u, s, v = torch.linalg.svd(layer.weight.flatten(1))
    torch.testing.assert_close(layer.B @ layer.A.flatten(1), (u[:, :2] * s[:2]) @ v[:2])


def test_compared_with_others() -> None:
    table = floorplan.compare(net(), X, methods=("full", "lora-fa", "lora-xs"), batches=(1, 4), measured=True)
    assert all(set((r.difference or {}).values()) == {0} for r in table.rows) and len(table.rows) == 6
    saved = {r.method: r.predicted.saved for r in table.rows if r.predicted and r.batch == 4}
    assert saved["lora-xs"] < saved["full"]
    gm = rewritten()
    first = layers_of(gm, (X,))[0]
    assert merges_of(gm) == 3 and first.base == 16 * 27 * 196 and first.merge == 2 * 16 * 27


def test_adapted_saved_loaded_and_merged_exactly(tmp_path: Path) -> None:
    batches = [(X, torch.arange(8) % 5)]
    found = floorplan.adapt(net(), batches, method="lora-xs", steps=4, lr=0.1)
    assert found.log.losses[-1] < found.log.losses[0]
    gm, path = found.module, tmp_path / "adapted.pt"
    assert all(m.R.any() for _, m in adapters(gm)) and len(adapters(gm)) == 2
    floorplan.save(gm, path)
    back: Any = floorplan.load(path, allow=("own_method",)).eval()
    assert torch.equal(back(X), gm(X)) and type(back.get_submodule("0")) is XsConv
    assert {n for n, p in back.named_parameters() if p.requires_grad} == {"0.R", "3.R"}
    merged = merge_verified(back, (X,))
    assert merged.exact is not None and merged.exact <= 1e-12 and merged.convs == 2
    source = net()
    source.load_state_dict(delta_state(back, source))
    torch.testing.assert_close(source.eval()(X), back(X), rtol=1e-4, atol=1e-5)


def test_a_file_names_no_class_of_a_package_that_is_not_allowed(tmp_path: Path) -> None:
    path = tmp_path / "adapted.pt"
    floorplan.save(rewritten(), path)
    says = r"class 'own_method.XsConv' is not on the allow-list; refused; --allow own_method, in Python load\(…, allow="
    for allow in ((), ("torchvision",), ("own_metho",)):
        with pytest.raises(LoadError, match=says if not allow else "allow") as e:
            floorplan.load(path, allow=allow)
        assert "\n" not in str(e.value)


def test_only_module_classes_of_an_allowed_package(tmp_path: Path) -> None:
    path = tmp_path / "adapted.pt"
    floorplan.save(rewritten(), path)
    document = torch.load(path, weights_only=True)
    record = next(r for r in document["modules"] if r["class"] == "own_method.XsConv")
    for name in ("own_method.main", "own_method.Path", "own_method.METHOD", "own_method.torch.nn.Sequential"):
        record["class"] = name
        torch.save(document, path)
        with pytest.raises(LoadError, match="adapted.pt: "):
            floorplan.load(path, allow=("own_method",))


def test_a_class_that_no_file_could_name_again_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = rewritten()

    class Local(XsConv):
        pass

    gm.get_submodule("0").__class__ = Local
    with pytest.raises(FloorplanError, match="Local is no class that a file can name; put it into a module"):
        floorplan.save(gm, tmp_path / "a.pt")
    gm = rewritten()
    monkeypatch.setattr(XsConv, "__module__", "__main__")
    with pytest.raises(FloorplanError, match="__main__.XsConv is no class that a file can name"):
        floorplan.save(gm, tmp_path / "a.pt")


def test_modules_of_the_users_own_are_saved_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_pkg.py").write_text(
        "from torch import nn\n\n\nclass Twice(nn.Module):\n    def __init__(self, times: int) -> None:\n"
        "        super().__init__()\n        self.times = times\n\n"
        "    def forward(self, x):\n        return x * self.times if x.sum() > -1e9 else x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import their_pkg  # type: ignore[import-not-found]

    gm = floorplan.rewrite(nn.Sequential(nn.Conv2d(3, 8, 1), their_pkg.Twice(2)), X, measured=False).module.eval()
    path = tmp_path / "a.pt"
    with pytest.raises(FloorplanError, match="Twice"):
        floorplan.save(gm, path)
    floorplan.save(gm, path, allow=("their_pkg",))
    with pytest.raises(LoadError, match="'their_pkg.Twice' is not on the allow-list; refused; --allow their_pkg"):
        floorplan.load(path)
    assert torch.equal(floorplan.load(path, allow=("their_pkg",)).eval()(X), gm(X))


def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """An installed package with these entry points, and nothing registered by hand."""
    info = tmp_path / "xs_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xs-pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[floorplan.methods]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    catalogue._REGISTERED.clear()
    catalogue._outside.cache_clear()


def test_the_command_line_finds_it_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry(tmp_path, monkeypatch, "lora-xs = own_method:METHOD")
    out, merged = str(tmp_path / "adapted.pt"), str(tmp_path / "merged.pt")
    assert catalogue.method_names()[-1] == "lora-xs" and catalogue.method_names()[0] == "zero-shot"
    code, text, err = run(capsys, "rewrite", RESIDUAL, *SIZE, "-o", out, "--method", "lora-xs", "--sites", "all")
    assert code == 0 and "-> " in text, err
    code, _, err = run(capsys, "check", out)
    assert code == 2 and "--allow own_method" in err and err.count("\n") == 1
    code, text, err = run(capsys, "check", out, "--allow", "own_method", "--measure")
    assert code in (0, 1) and "XsConv" not in err and "difference" in text, err
    code, text, err = run(capsys, "merge", out, "-o", merged, "--allow", "own_method")
    assert code == 0 and "convs merged" in text, err
    assert not adapters(floorplan.load(merged))


@pytest.mark.parametrize(
    "line,name,says",
    [
        ("memflora = own_method:METHOD", "memflora", "entry point own_method:METHOD is the method lora-xs"),
        ("mine = no_such_module:METHOD", "mine", "entry point no_such_module:METHOD cannot be loaded"),
        ("mine = own_method:XsConv", "mine", "entry point own_method:XsConv is a type"),
        ("mine = own_method:METHOD", "theirs", "method theirs: not known; use zero-shot, .*, mine$"),
    ],
)
def test_a_bad_entry_point_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str, says: str
) -> None:
    entry(tmp_path, monkeypatch, line)
    with pytest.raises(FloorplanError, match=says) as e:
        floorplan.check(net(), X, rank=2, method=name)
    assert "\n" not in str(e.value)
    assert floorplan.check(net(), X, rank=2, method="lora-fa").verdict  # the others are as they were


def test_a_name_is_taken_once() -> None:
    assert floorplan.register(METHOD) is METHOD  # the same one again
    for name in ("memflora", "lora-xs"):
        other = floorplan.Method(name, "another", lambda o: ())
        with pytest.raises(FloorplanError, match=f"^method {name}: another method has that name") as e:
            floorplan.register(other)
        assert "\n" not in str(e.value)
    with pytest.raises(FloorplanError, match="^register: a str is no method"):
        floorplan.register("lora-xs")  # type: ignore[arg-type]


def test_a_conv_that_the_layer_is_not_made_for_stays_as_it_is() -> None:
    floorplan.register(METHOD)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
    report = floorplan.rewrite(net, torch.randn(2, 4, 8, 8), rank=2, sites="all", method="lora-xs")
    assert [type(m) for _, m in adapters(report.module)] == [XsConv]
    assert "ungrouped" in str(report)
