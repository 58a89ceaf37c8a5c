"""The hard models: predicted, measured by hooks, census and known figures agree; each rewrite is judged right."""

import warnings

import pytest
import torch
from hard_models import HARD, build

import floorplan
from floorplan.errors import FloorplanError, TraceError
from floorplan.graph.trace import Traced, trace
from floorplan.ledger.analyze import trainable
from floorplan.ledger.criterion import AT_FLOOR
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.figures import Figures, figures, measure
from floorplan.ledger.report import CheckReport
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import tensors_in

BROKEN = ("in-place-add-after-relu", "branch-on-values")
SOUND = [n for n in HARD if n not in BROKEN]
WARNING = "Using padding='same' with even kernel lengths"


def exact(traced: Traced, inputs: tuple[torch.Tensor, ...]) -> tuple[Figures, int]:
    """Predicted figures, and the number of storages that are not model state."""
    fakes = concrete_fakes(traced.gm, inputs)
    hooked = run(Step(fakes.gm, fakes.inputs).forward, Watch(hooks=True), fakes)
    plain = run(Step(fakes.gm, fakes.inputs), Watch(), fakes)
    found = figures(fakes.gm, hooked, plain, list(tensors_in(inputs)))
    return found, len({s.storage for s in hooked.saved if s.owner != "state" and s.nbytes})


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=WARNING)


@pytest.mark.parametrize("name", SOUND)
def test_predicted_is_measured_is_known(name: str) -> None:
    hard = HARD[name]
    for mode, known, storages in (("train", hard.train, 0), ("eval", hard.evaluate, 1)):
        model, inputs = build(name)
        model.train(mode == "train")
        predicted, count = exact(trace(model, inputs), inputs)
        assert predicted == measure(model, inputs), mode
        assert (predicted.saved, predicted.saved_refcount) == known
        assert predicted.saved_census == predicted.saved
        assert count == hard.storages[storages]


@pytest.mark.parametrize("name", SOUND)
def test_twice_the_batch(name: str) -> None:
    model, inputs = build(name, batch=2)
    predicted, _ = exact(trace(model, inputs), inputs)
    assert predicted == measure(model, inputs)
    assert predicted.saved == HARD[name].doubled


@pytest.mark.parametrize("name", SOUND)
def test_the_formulas_give_the_exact_figure(name: str) -> None:
    report = floorplan.check(*build(name))
    once = {e.storage: e.nbytes for e in report.proof.kept}
    assert sum(once.values()) == report.predicted.saved == HARD[name].train[0]
    assert report.verdict != AT_FLOOR and report.exit_code == 1


def test_autocast_keeps_half_maps_and_weight_copies() -> None:
    report = floorplan.check(*build("autocast"), measured=True, autocast=torch.bfloat16)
    assert report.measured is not None and report.predicted == report.measured
    assert report.predicted.saved == 40032


AS_WIDE = ("grouped-deconv", "channel-split-and-shuffle")  # at rank 2: two channels a group, two in all


@pytest.mark.parametrize("name", [n for n in SOUND if HARD[n].floor != "no"])
def test_the_rewritten_model(name: str) -> None:
    hard = HARD[name]
    report = floorplan.check(*build(name), rank=2, sites="all", measured=True)
    assert report.predicted == report.measured
    if name in AS_WIDE:
        assert all("no bottleneck" in e.reason for e in report.proof.guilty)
    elif hard.floor == "yes":
        assert report.verdict == AT_FLOOR, [(e.node, e.reason) for e in report.proof.guilty]
    assert report.verdict == (AT_FLOOR if not report.proof.guilty else report.verdict)
    assert hard.sites is not None and site_bytes(report) <= hard.sites
    looked_at = {s.node.split(".")[0] for _, s in report.refused}
    assert looked_at >= set(hard.refused)


def site_bytes(report: CheckReport) -> int:
    """Distinct bytes that the adapted sites keep."""
    adapted = {e.node for e in report.proof.kept if e.pillar == "adapter"}
    once = {e.storage: e.nbytes for e in report.proof.kept if e.node in adapted}
    return sum(once.values())


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("handwritten-swish", "mul"),
        ("max-pool-keeps-its-input", "tanh"),
        ("conv-bias-before-norm", "pow_1"),
        ("norm-without-statistics", "b1"),
        ("spectral-norm", "c2"),
        ("group-and-instance-norm", "b1"),
        ("conv-lstm", "lstm"),
    ],
)
def test_what_stays_is_named(name: str, node: str) -> None:
    report = floorplan.check(*build(name), rank=2, sites="all")
    assert report.verdict != AT_FLOOR
    assert node in {e.node for e in report.proof.guilty}


def test_an_overwritten_tensor_is_named_before_any_rewrite() -> None:
    model, inputs = build("in-place-add-after-relu")
    for call in (
        lambda: floorplan.check(model, inputs),
        lambda: floorplan.check(model, inputs, rank=2),
        lambda: floorplan.rewrite(model, inputs),
        lambda: trainable(trace(model, inputs).gm, inputs),
    ):
        with pytest.raises(TraceError, match=r"^(\w+: )?iadd \(hard_nets.py:\d+\): overwrites .* relu") as e:
            call()
        assert "\n" not in str(e.value)


def test_a_branch_on_values_is_refused_by_its_line() -> None:
    for rank in (None, 2):
        with pytest.raises(TraceError, match=r"hard_nets.py:\d+: branches on tensor values") as e:
            floorplan.check(*build("branch-on-values"), rank=rank)
        assert "\n" not in str(e.value)


def test_a_branch_on_sizes_is_taken_and_said() -> None:
    report = floorplan.check(*build("branch-on-sizes"), rank=2, sites="all")
    assert any("branch decided for input sizes" in n for n in report.notes)


def test_a_checkpointed_model_is_one_node_and_said() -> None:
    model, inputs = build("checkpointed")
    report = floorplan.check(model, inputs, measured=True)
    assert "checkpointing" in " ".join(report.opaque.values())
    assert report.predicted == report.measured
    with pytest.raises(FloorplanError, match="checkpointing"):
        floorplan.check(model, inputs, rank=2)


def test_the_rewritten_model_keeps_keys_flags_and_layout() -> None:
    model, inputs = build("ordered-dict-output")
    module = floorplan.rewrite(model, inputs, sites="all", measured=False).module
    out = module(*inputs)
    assert type(out).__name__ == "OrderedDict" and list(out) == ["out", "aux"]
    model, inputs = build("training-flag")
    module = floorplan.rewrite(model, inputs, sites="all", measured=False).module.eval()
    torch.testing.assert_close(module(*inputs), model.eval()(*inputs), rtol=1e-4, atol=1e-5)
    model, inputs = build("channels-last")
    module = floorplan.rewrite(model, inputs, sites="all", measured=False).module
    assert module(*inputs).is_contiguous(memory_format=torch.channels_last)
