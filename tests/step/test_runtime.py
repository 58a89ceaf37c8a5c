"""What a written step may name: every op of a step, by one import, and no more."""

from floorplan.layers.activations import gate_of
from floorplan.step import ops, runtime, stream
from floorplan.step.region import Region
from floorplan.step.runner import Runner, Stage


def test_one_import_gives_all_that_a_written_step_names() -> None:
    names: dict[str, object] = {}
    exec("from floorplan.step.runtime import *", names)
    del names["__builtins__"]
    known = {"Region": Region, "Runner": Runner, "Stage": Stage, "gate_of": gate_of}
    assert set(names) == set(runtime.__all__) == known.keys() | set(ops.__all__) | set(stream.__all__)
    for name, value in names.items():
        assert value is known.get(name, getattr(ops, name, getattr(stream, name, None)))
