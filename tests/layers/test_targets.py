"""The allow-list of what a stored graph may call: no name of code or memory is on it."""

import collections
from typing import Any

import pytest
from documents import X, call, image, refused

from floorplan.layers.targets import _functions, function_named, methods
from floorplan.store.artifact import decode
from floorplan.store.modules import torch_classes

FUNCTIONS = """
os.system posix.system torch.load torch.hub.load torch.save torch.classes.load_library
torch.ops.load_library builtins.eval builtins.exec builtins.open builtins.__import__
builtins.setattr operator.methodcaller operator.attrgetter operator.call subprocess.Popen
torch.jit.load torch.autocast torch.from_file torch.ops.aten.from_file.default
torch.ops.aten.save.default torch.ops.aten.warn torch.ops.aten.set_.source_Storage
torch.ops.profiler._record_function_enter torch.nn.functional.F torch.ops.aten.__class__
torch.ops.aten.add.__class__ torch.ops.aten._dir torch.ops torch.ops. torch.ops.aten
torch.utils.cpp_extension.load torch._C._cuda_init torch.fx.wrap floorplan.cli.main relu
torch.relu.__call__ torch.fbgemm_pack_quantized_matrix math.__loader__ collections.namedtuple
""".split()


@pytest.mark.parametrize("target", [*FUNCTIONS, "", "torch.relu\n", "torch.relu; import os"])
def test_hostile_functions(target: str) -> None:
    refused(call(target, X), "y")


METHODS = """
__reduce__ __class__ __init_subclass__ apply_ map_ map2_ backward register_hook numpy set_
share_memory_ data_ptr storage untyped_storage resize_ grad_fn data shape _make_subclass
_backward_hooks module_load as_subclass no_such_method relu.__call__ relu()
""".split()


@pytest.mark.parametrize("target", METHODS)
def test_hostile_methods(target: str) -> None:
    refused(call(target, X, op="call_method"), "y")


@pytest.mark.parametrize(
    "args", [[X, "__class__"], [X, "grad_fn"], [X, "data"], [X], ["text", "shape"], [X, "shape", 0], [X, X]]
)
def test_hostile_attributes(args: list[Any]) -> None:
    assert decode(call("builtins.getattr", X, "shape"))(image()) == image().shape
    refused(call("builtins.getattr", *args), "y")


def test_allow_list_holds_functions_only() -> None:
    assert len(_functions()) > 500
    assert len(torch_classes()) > 100
    for name, f in _functions().items():
        assert callable(f) and function_named(name, "y") is f
        assert (
            "__" not in name
            and (name.startswith("builtins") or not isinstance(f, type))
            or (f is collections.OrderedDict)
        )
    assert {"relu", "add_", "view", "to"} <= methods()
