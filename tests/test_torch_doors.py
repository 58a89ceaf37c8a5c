"""Every door to torch's insides still opens on what the product relies on, and there is no other way in."""

import ast
import linecache
import math
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from floorplan import torch_doors as doors
from floorplan.graph.decide import checkpointing
from floorplan.layers.functions import applied
from floorplan.layers.layer import model_state
from floorplan.ledger.kernels import upsamplings
from tests.test_layers import ROOT

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


# --- modules


def test_the_stores_of_a_module_are_its_own_dicts() -> None:
    norm = nn.BatchNorm2d(4)
    norm.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(doors.parameters_of(norm)) == ["weight", "bias"]
    assert list(doors.buffers_of(norm)) == ["running_mean", "running_var", "num_batches_tracked", "passing"]
    assert {**doors.parameters_of(norm), **doors.buffers_of(norm)} == doors.tensors_of(norm)
    assert doors.transient_of(norm) == {"passing"} and "passing" not in norm.state_dict()
    doors.parameters_of(norm)["weight"] = nn.Parameter(torch.full((4,), 3.0))
    doors.buffers_of(norm)["running_mean"] = torch.full((4,), 5.0)
    doors.transient_of(norm).add("running_var")
    assert norm.weight[0] == 3 and norm.state_dict()["running_mean"][0] == 5
    assert "running_var" not in norm.state_dict() and "num_batches_tracked" in norm.state_dict()
    assert doors.parameters_of(nn.Conv2d(3, 4, 1, bias=False))["bias"] is None
    net = small()
    assert list(doors.children_of(net).values()) == list(net)
    doors.children_of(net)["2"] = nn.Sigmoid()
    assert isinstance(net[2], nn.Sigmoid)
    held = vars(norm)
    assert all(isinstance(v, kind | None) for slot, kind in doors.STORES.items() for v in held[slot].values())


@pytest.mark.parametrize("kind", ["forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"])
def test_hooks_are_seen_by_kind(kind: str) -> None:
    register = {"backward_hooks": "full_backward_hook", "backward_pre_hooks": "full_backward_pre_hook"}
    m = nn.Linear(2, 2)
    assert doors.hooks_of(m) == {}

    def hook(*args: Any) -> None: ...

    handle = getattr(m, f"register_{register.get(kind, kind[:-1])}")(hook)
    assert doors.hooks_of(m) == {kind: [hook]}
    handle.remove()
    assert doors.hooks_of(m) == {}


def test_gradient_hooks_are_seen() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        t = torch.ones(2, requires_grad=True)
        assert not doors.has_gradient_hook(t)
        getattr(t, register)(lambda *args: None)
        assert doors.has_gradient_hook(t)


def test_the_kinds_of_layers() -> None:
    kinds = [
        (doors.ConvNd, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        (doors.BatchNormNd, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        (doors.NormBase, nn.BatchNorm2d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        (doors.MaxPoolNd, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        (doors.AvgPoolNd, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        (doors.AdaptiveMaxPoolNd, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        (doors.AdaptiveAvgPoolNd, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        (doors.DropoutNd, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    ]
    for base, *classes in kinds:
        assert all(issubclass(c, base) for c in classes)
    assert not issubclass(nn.InstanceNorm2d, doors.BatchNormNd) and not issubclass(nn.LayerNorm, doors.NormBase)


def test_what_a_layer_computes_is_in_these_methods() -> None:
    class Other(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return input

    assert torch.equal(Other(3, 4, 1)(X), X)
    for name in doors.FORWARDS:
        assert callable(getattr(nn.Conv2d, name)) and name in ("forward", "_conv_forward")


def test_compiled_modules() -> None:
    net = small()
    assert doors.eager_of(cast(nn.Module, torch.compile(net))) is net
    assert getattr(net, doors.COMPILED_CALL) is None
    net.compile()
    assert callable(vars(net)[doors.COMPILED_CALL])


# --- tensors and autograd


def test_tensors_on_one_storage_have_one_key() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    assert doors.storage_key(a) == doors.storage_key(a[1:].view(3, 1)) == doors.storage_key(a.detach())
    assert doors.storage_key(a) != doors.storage_key(b)
    with doors.FakeTensorMode():
        c = torch.zeros(4)
        assert doors.storage_key(c) == doors.storage_key(c.view(2, 2)) != doors.storage_key(torch.zeros(4))


def test_writing_counts_up() -> None:
    t = torch.zeros(3)
    was = doors.version_of(t)
    t[0].add_(1)
    assert doors.version_of(t) == was + 1 and doors.version_of(t.detach()) == was + 1


def test_autograd_numbers_its_nodes_in_order() -> None:
    x = torch.ones(3, requires_grad=True)
    seen: list[int | None] = []
    before = doors.next_number()
    y = x.exp()
    between = doors.next_number()
    z = y.sin()
    assert before <= doors.number_of(y.grad_fn) < between <= doors.number_of(z.grad_fn) < doors.next_number()
    assert doors.running_number() is None
    cast(Any, y.register_hook)(lambda g: seen.append(doors.running_number()))
    z.register_hook(lambda g: seen.append(doors.running_number()))
    z.sum().backward()  # type: ignore[no-untyped-call]
    assert doors.running_number() is None and len(seen) == 2

    class Mode(doors.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append((func, doors.running_number()))
            return func(*args, **(kwargs or {}))

    ops: list[tuple[Any, int | None]] = []
    y = x.exp()
    with Mode():  # type: ignore[no-untyped-call]
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert (torch.ops.aten.mul.Tensor, doors.number_of(y.grad_fn)) in ops


def test_what_a_node_has_saved_is_found_by_name() -> None:
    x = torch.ones(3, requires_grad=True)
    y: Any = x.exp().grad_fn
    assert "_saved_result" in doors.saved_names(type(y)) and torch.equal(y._saved_result, x.exp())

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

    assert torch.equal(applied(Own, x), x * 2)
    assert "saved_tensors" in doors.saved_names(type(applied(Own, x).grad_fn))


def test_transforms_and_their_levels_are_seen() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append((doors.transformed(), doors.forward_mode(), doors.gradient_levels(x)))
        return x.sum()

    x, func = torch.ones(2, 3), torch.func
    look(x)
    look(x.clone().requires_grad_())
    func.vmap(look)(x)
    func.vmap(func.grad(look))(x)
    func.grad(lambda x: func.vmap(look)(x).sum())(x)
    func.grad(lambda x: func.grad(look)(x).sum())(x)
    func.vmap(look)(x.clone().requires_grad_())
    func.jvp(look, (x,), (x,))
    none: tuple[int, ...] = ()
    assert seen[:2] == [(False, False, none), (False, False, (0,))]
    assert [s[2] for s in seen[2:]] == [none, (2,), (1,), (2, 1), (0,), none]
    assert [s[1] for s in seen[2:]] == [False] * 5 + [True] and all(s[0] for s in seen[2:])


def test_the_innermost_hooks_are_in_force() -> None:
    assert doors.saved_hooks() is None
    pack, unpack = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.save_on_cpu():  # type: ignore[no-untyped-call]
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert doors.saved_hooks() == (pack, unpack)
        assert doors.saved_hooks() not in (None, (pack, unpack))


def test_selective_checkpointing_says_nothing_of_our_hooks(recwarn: pytest.WarningsRecorder) -> None:
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
    packed: list[Tensor] = []
    with doors.saving(lambda t: packed.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(lambda t: t.exp().sin(), x, use_reentrant=False, context_fn=keep).exp()
        assert doors.saved_hooks() is not None
    y.sum().backward()
    assert packed and not recwarn.list


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_seen_from_inside_alone(reentrant: bool) -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(checkpointing())
        return x.exp()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    run(X)
    assert seen == [True, False]


# --- fakes and ops


def test_a_fake_is_made_directly_by_the_kernel_of_tensors_without_data() -> None:
    mode = doors.FakeTensorMode()
    x = mode.from_tensor(X)
    with mode:
        part = doors.directly(x, torch.ops.aten.slice.Tensor, x, 1, 1, 2)
        new = doors.directly(x, torch.empty, [2, 3], dtype=x.dtype, device="meta")
    assert isinstance(part, doors.FakeTensor) and part.fake_mode is mode and part.device == new.device == X.device
    assert (part.shape, part.stride(), part.storage_offset()) == ((2, 1, 8, 8), X.stride(), 64)
    assert part.untyped_storage()._cdata == x.untyped_storage()._cdata and new.shape == (2, 3)


def test_fakes_have_sizes_and_no_values() -> None:
    with doors.FakeTensorMode() as mode:
        t = mode.from_tensor(X, static_shapes=True)
        assert isinstance(t, doors.FakeTensor) and t.shape == X.shape
        for ask in (lambda: t.sum().item(), t.nonzero, t.numpy):
            with pytest.raises(Exception) as e:
                ask()
            assert doors.wants_values(e.value)
            assert isinstance(e.value, doors.VALUES_ASKED) or ask == t.numpy
        assert not doors.wants_values(ValueError("sizes do not fit"))
        with doors.no_modes():
            assert type(torch.zeros(2)) is Tensor


def test_sizes_that_become_text_are_told() -> None:
    mode, told = doors.FakeTensorMode(shape_env=ShapeEnv()), list[Any]()
    t = mode.from_tensor(torch.zeros(13), source=doors.ConstantSource("here"), symbolic_context=some_context())
    plain = repr(t.shape[0])
    with doors.sizes_as_text(told.append):
        assert f"{t.shape[0]}" == str(t.shape[0]) == repr(t.shape[0]) == plain
    assert len(told) == 3 and repr(t.shape[0]) == plain and len(told) == 3


def some_context() -> Any:
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])


def test_symbols_have_names_and_divide() -> None:
    mode = doors.FakeTensorMode(shape_env=ShapeEnv())
    chosen: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    t = mode.from_tensor(torch.zeros(13), symbolic_context=chosen, source=doors.ConstantSource("here"))
    assert (t.shape[0] // 2).node.expr.has(doors.FloorDiv)
    assert (t.shape[0] % 2).node.expr.has(doors.Mod)


@pytest.mark.parametrize("learns", [True, False])
def test_what_a_comparison_teaches(learns: bool) -> None:
    class Env(doors.SymbolEnv):
        def replaces(self, symbol: Any, value: Any) -> bool:
            return learns

    env = Env(duck_shape=False)
    mode = doors.FakeTensorMode(shape_env=env)
    chosen: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    t = mode.from_tensor(torch.zeros(13, 13), symbolic_context=chosen, source=doors.ConstantSource("t"))
    a, b = (n.node.expr for n in t.shape)
    assert env.decided(sympy.Ge(a, 2)) and not env.decided(sympy.Gt(a, 12))
    assert t.shape[0] == t.shape[1]
    assert (env.replace(a) == env.replace(b)) is learns and len(env.guards) == 1
    assert env.guards[0].sloc.framework_loc is None


def test_containers_are_walked() -> None:
    tree = {"a": [X, (1, None)], "b": X}
    for found in (doors.tree_leaves(tree), list(doors.tree_iter(tree))):
        assert [id(v) for v in found] == [id(v) for v in (X, 1, None, X)]
    assert doors.tree_map(lambda v: 0, {"a": [1, (2,)]}) == {"a": [0, (0,)]}


def test_ops_say_what_they_are() -> None:
    schema = doors.schema_of(torch.ops.aten.add.Tensor)
    assert (schema.name, schema.overload_name, len(schema.returns)) == ("aten::add", "Tensor", 1)
    assert doors.schema_of(torch.ops.aten.relu.default).overload_name == ""
    written = [a.name for a in doors.schema_of(torch.ops.aten.add_.Tensor).arguments if a.alias_info]
    assert written == ["self"]
    assert isinstance(torch.ops.aten.add, doors.OPS) and isinstance(torch.ops.aten.add.Tensor, doors.OPS)
    assert {"aten::add.Tensor", "aten::relu"} <= set(doors.op_names()) and "aten::save" not in doors.op_names()


def dispatched(run: Callable[[], Any]) -> list[Any]:
    """The ops that a call dispatches."""

    class Seen(doors.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func)
            return func(*args, **(kwargs or {}))

    ops: list[Any] = []
    with Seen():  # type: ignore[no-untyped-call]
        run()
    return ops


def test_the_named_ops_are_those_that_run() -> None:
    aten = torch.ops.aten
    assert dispatched(lambda: torch.ones(1).item())[-1] is doors.READ_NUMBER
    with doors.FakeTensorMode(), doors.enable_python_dispatcher():  # the Python kernel of a BatchNorm calls it
        x = torch.zeros(2, 3, 4)
        assert len(doors.BATCH_NORMS[0](x, None, None, torch.zeros(3), torch.zeros(3), True, 0.1, 1e-5)) == 3
        assert len(doors.BATCH_NORMS[1](x, None, None, True, 0.1, 1e-5)) == 3
    for dims, pool in ((2, F.adaptive_avg_pool2d), (3, F.adaptive_avg_pool3d)):
        y = torch.randn(2, 3, *[6] * dims, requires_grad=True)
        out = cast(Any, pool)(y, [2] * dims)
        out.backward(g := torch.randn_like(out))
        assert y.grad is not None and torch.equal(doors.ADAPTIVE_BACKWARD[dims](g, y.detach()), y.grad)
    for name in upsamplings():
        assert aten.__getattr__(name).overloads() and "backward" not in name
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        ran = dispatched(partial(F.interpolate, X, scale_factor=2.0, mode=mode))
        assert {doors.schema_of(op).name.split("::")[1] for op in ran} & set(upsamplings())


def test_the_backward_of_log_softmax_is_an_op() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert doors.LOG_SOFTMAX_BACKWARD in dispatched(lambda: x.log_softmax(1).sum().backward())


def test_a_custom_op_runs_bare_where_nobody_watches() -> None:
    from floorplan.layers.bits import pack_gate

    bare = doors.kernel_of(pack_gate)
    assert bare is not pack_gate and torch.equal(bare(X, 0.0, math.inf, False), pack_gate(X, 0.0, math.inf, False))
    with doors.FakeTensorMode():
        assert doors.kernel_of(pack_gate) is pack_gate


def test_which_convolution_runs() -> None:
    x, w = torch.randn(1, 2, 3, 4, 5), torch.randn(2, 3, 1, 2, 2)
    assert doors.slow_transposed((x.double(), w.double(), None, [1] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1))
    assert not doors.slow_transposed((X, torch.randn(4, 3, 1, 1), None, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1))


# --- torch.fx


def test_graphs() -> None:
    gm = fx.symbolic_trace(small())
    assert doors.calls_plainly(gm.graph)
    assert not doors.calls_plainly(torch.export.export(small().eval(), (X,)).module().graph)  # type: ignore[attr-defined]
    relu = next(n for n in gm.graph.nodes if n.target == "2")
    assert not doors.is_erased(relu)
    relu.replace_all_uses_with(relu.args[0])
    gm.graph.erase_node(relu)
    assert doors.is_erased(relu)

    class Own(fx.Tracer):
        pass

    graph = Own().trace(small())
    doors.forget_tracer(graph)
    assert Own not in vars(graph).values()


def test_proxies() -> None:
    tracer, graph = fx.Tracer(), fx.Graph()
    tracer.root, tracer.graph = nn.Module(), graph
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    shape = fx.proxy.Attribute(proxy, "shape")
    assert set(vars(proxy)) | set(vars(shape)) == doors.PROXY_FIELDS
    first = shape.node
    doors.renew(shape)
    assert shape.node is first
    graph.erase_node(first)
    doors.renew(shape)
    assert shape.node is not first and not doors.is_erased(shape.node)


def test_constants_are_named() -> None:
    class Adds(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + torch.ones(2)

    gm = fx.symbolic_trace(Adds())
    (name,) = [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
    assert name.startswith(doors.CONSTANT)


# --- what is changed while torch runs


def test_kernels_are_replaced_and_put_back() -> None:
    """Of a dropout, torch's Python kernel keeps a boolean mask by way of other ops than the C++ kernel."""
    dropout, plain = torch.ops.aten.dropout.default, torch.ops.aten.relu.default
    before = dict(dropout.py_kernels), dict(plain.py_kernels)

    def run() -> list[Any]:
        with doors.enable_python_dispatcher():
            return dispatched(lambda: F.dropout(torch.ones(4, requires_grad=True), 0.5, True))

    usual = run()
    with doors.other_kernels({dropout: None}):
        replaced = run()
    assert replaced == dispatched(lambda: F.dropout(torch.ones(4, requires_grad=True), 0.5, True)) != usual
    called: list[Any] = []

    def own(*args: Any) -> Tensor:
        called.append(args)
        return args[0]

    with doors.other_kernels({dropout: own}), doors.enable_python_dispatcher():
        F.dropout(torch.ones(4), 0.5, True)
    assert len(called) == 1 and run() == usual
    assert before == (dict(dropout.py_kernels), dict(plain.py_kernels))


def test_lstm_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    want, seen = lstm(x)[0], []

    def run(plain: Callable[..., Any], *args: Any) -> Any:
        seen.append(args[0])
        return plain(*args)

    with doors.other_lstm(run):
        assert torch.equal(lstm(x)[0], want)
    assert seen == [x]
    assert torch.equal(lstm(x)[0], want) and len(seen) == 1
    monkeypatch.setattr(nn.LSTM, "forward", lambda self, x: x)
    with doors.other_lstm(run):  # a user's own
        assert lstm(x) is x
    monkeypatch.setattr(nn.LSTM.forward, "__module__", nn.LSTM.__module__)
    with pytest.raises(RuntimeError, match=r"^torch 2\.\d+.*: nn.LSTM's function cannot be replaced"):
        with doors.other_lstm(run):
            pass


def test_a_kernel_that_does_not_take_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.upsample_nearest2d.vec
    before = dict(op.py_kernels)
    monkeypatch.setattr(type(op), "_get_dispatch", lambda self, key: key)
    with pytest.raises(RuntimeError, match=r"a Python kernel of aten.upsample_nearest2d.vec cannot be replaced"):
        with doors.other_kernels({op: lambda *args: None}):
            pass
    assert dict(op.py_kernels) == before


def test_generated_code_has_lines() -> None:
    name = "<floorplan test of a door>"
    text = "def f():\n    raise ValueError  # this line\n"
    doors.show_source(name, text)
    space: dict[str, Any] = {}
    exec(compile(text, name, "exec"), space)
    with pytest.raises(ValueError) as e:
        space["f"]()
    linecache.checkcache()
    assert "# this line" in "".join(traceback.format_exception(e.value))


# --- no other way in

DOORS = ROOT / "floorplan" / "torch_doors.py"
NET = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 1)), nn.LSTM(3, 3))
GRAPH = fx.symbolic_trace(nn.ReLU())
MADE = (
    X,
    X.untyped_storage(),
    GRAPH,
    GRAPH.graph,
    *GRAPH.graph.nodes,
    fx.Tracer(),
    ShapeEnv(),
    torch.ops.aten.add.Tensor,
)
SPACES = (torch, torch.ops.aten, torch.ops.aten.add, nn, fx, F)
TORCHS = {n for o in (*NET.modules(), *MADE, *SPACES) for n in dir(o) if n.startswith("_") and not n.startswith("__")}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.Module) -> set[str]:
    """Names that a file itself gives to functions, classes and attributes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {n.name for n in ast.walk(tree) if isinstance(n, kinds)}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name) and isinstance(n.ctx, ast.Store))
    return found | {n.attr if isinstance(n, ast.Attribute) else n.id for n in stored}


def leaks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names of torch that a file reads, and changes that it makes while torch runs."""
    own = defined(tree)
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and str(n.module).split(".")[0] == "torch":
            parts = [*str(n.module).split("."), *(a.name for a in n.names)]
            yield from ((n.lineno, p) for p in parts if private(p))
        elif isinstance(n, ast.Import):
            yield from ((n.lineno, a.name) for a in n.names if a.name.startswith("torch.") and "._" in a.name)
        elif isinstance(n, ast.Attribute) and private(n.attr):
            on = n.value.id if isinstance(n.value, ast.Name) else ""
            signs = (on in ("self", "cls"), n.attr in own, n.attr not in TORCHS)  # that it is the file's own
            if sum(signs) < 2 and on not in sys.stdlib_module_names:
                yield n.lineno, n.attr
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value in TORCHS and n.value not in own:
            yield n.lineno, repr(n.value)
        if isinstance(n, ast.ImportFrom) and n.module == "unittest.mock":
            yield n.lineno, "unittest.mock"
        elif isinstance(n, ast.Attribute) and (ast.unparse(n) == "linecache.cache" or n.attr == "py_kernels"):
            yield n.lineno, ast.unparse(n)


def files() -> Iterator[Path]:
    for top in ("floorplan", "passes", "cost_models", "examples"):
        yield from (p for p in sorted((ROOT / top).rglob("*.py")) if p.resolve() != DOORS)


def test_no_private_name_of_torch_is_used_elsewhere() -> None:
    found = [f"{p.relative_to(ROOT)}:{line}: {name}" for p in files() for line, name in leaks(ast.parse(p.read_text()))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree as pytree",
        "from torch.optim.optimizer import _default_to_fused_or_foreach",
        "import torch\nx = torch._VF.lstm",
        "def f(m):\n    return m._parameters",
        "def f(t):\n    return t.untyped_storage()._cdata",
        "def f(m):\n    return getattr(m, '_forward_hooks')",
        "class M:\n    def f(self):\n        return self._modules",
        "class M:\n    def f(self, t):\n        self._version = t._version",
        "from unittest.mock import patch",
        "def f(op, k):\n    op.py_kernels.pop(k)",
    ],
)
def test_a_private_name_is_seen_however_it_is_read(code: str) -> None:
    assert list(leaks(ast.parse(code)))


def test_each_door_has_a_test() -> None:
    tree = ast.parse(DOORS.read_text())
    made = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    made |= {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    made |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    made |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    opened = {n.attr for n in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(n, ast.Attribute)}
    assert {m for m in made if not m.startswith("_")} - {"Hooks"} <= opened


# --- tensors in containers


def test_a_storage_has_one_key() -> None:
    a = torch.zeros(4)
    assert doors.storage_key(a) == doors.storage_key(a.view(2, 2)) != doors.storage_key(a.clone())


def test_state_is_parameters_and_buffers() -> None:
    norm = nn.BatchNorm2d(3)
    assert {id(t) for t in model_state(norm)} == {id(t) for t in (*norm.parameters(), *norm.buffers())}


def test_tensors_in_any_container() -> None:
    @dataclass
    class Output:
        logits: Tensor
        hidden: tuple[Tensor, ...]
        name: str = "x"

    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    assert list(map(len, doors.tensors_in({"out": [Output(a, (b,)), None, 3], "more": c}))) == [1, 2, 3]
    made = doors.map_tensors(lambda t: t + 1, {"out": [Output(a, (b,)), None, 3], "more": c})
    assert [float(t[0]) for t in doors.tensors_in(made)] == [1, 1, 1] and made["out"][0].name == "x" and not a.any()

    @dataclass
    class Both(OrderedDict[str, Tensor]):  # as ModelOutput is
        logits: Tensor

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    @dataclass(slots=True)
    class Slim:
        logits: Tensor

    (slim,) = doors.map_tensors(lambda t: t + 1, (Slim(a),))
    assert float(slim.logits) == 1 and not a.any() and list(doors.tensors_in(slim)) == [slim.logits]

    both = doors.map_tensors(lambda t: t + 1, Both(a))
    assert both.logits is both["logits"] and float(both.logits) == 1 and not a.any()
