"""Straight-line rules of an inverted residual that is streamed in groups of channels (step_stream)."""

from torch import fx

from floorplan.step.ir import Instr, Names
from floorplan.step.rules import RULES, Context, close, conv_name, opened, shape_of, tensors
from floorplan.step.stream import streams
from floorplan.step.studied import Studied

Triple = tuple[fx.Node, fx.Node, fx.Node]


def triple(c: Context, node: fx.Node) -> Triple | None:
    """The inverted residual that begins at a node, if it is streamed: nobody else reads its wide maps."""
    chain = [node]
    while c.stream and len(chain) < 3:
        users = list(chain[-1].users)
        if len(users) != 1 or users[0].op != "call_module" or users[0].args[0] is not chain[-1]:
            return None
        chain.append(users[0])
    if not c.stream or not all(c.rules.get(n.name) is RULES["site"] for n in chain):
        return None
    alone = all(len(tensors(n)) == 1 for n in chain[:2])
    e, d, p = chain
    return (e, d, p) if alone and streams(*map(c.module, chain)) else None


def wide(s: Studied) -> set[str]:
    """Nodes whose maps streaming does without: no stage may end behind them."""
    c = Context(s.gm, s.values, s.learns, s.rules, frozenset(), frozenset(), Names(()), {}, stream=1)
    found = [t for n in s.nodes if n.op == "call_module" and (t := triple(c, n)) is not None]
    return {n.name for t in found for n in t[:2]}


def stream_forward(c: Context, t: Triple) -> None:
    """An inverted residual in groups of channels."""
    e, _, p = t
    x, refs = tensors(e)[0], ", ".join(c.ref(n) for n in t)
    if x.name in c.learns:
        shape_of(c, x, p)
    learns = p.name in c.learns
    out = (conv_name(c, p), c.of(p, "k")) if learns else (conv_name(c, p),)
    code = f"{'stream' if learns else 'streamed'}({{0}}, {refs}, {c.stream})"
    c.forward.append(Instr(p.name, out, code, (c.of(x),)))
    close(c, p)


def stream_backward(c: Context, t: Triple, g: str) -> None:
    """Its gradients."""
    e, _, p = t
    x, refs = tensors(e)[0], ", ".join(c.ref(n) for n in t)
    g, kept = opened(c, p, g), c.of(p, "k")
    if x.name not in c.learns:
        c.backward.append(Instr(p.name, (), f"stream_grad({{0}}, {{1}}, {refs}, {c.stream}, None)", (g, kept)))
        return
    old, out, shape = c.grads.get(x.name), c.fresh(x), shape_of(c, x, p)
    code = f"stream_grad({{0}}, {{1}}, {refs}, {c.stream}, {{2}})"
    if old is None:
        c.backward.append(Instr(p.name, (out,), code, (g, kept, shape)))
    else:
        reads = (old, g, kept, shape)
        apart = f"total({{0}}, stream_grad({{1}}, {{2}}, {refs}, {c.stream}, {{3}}))"
        into = f"stream_grad({{1}}, {{2}}, {refs}, {c.stream}, {{3}}, {{0}})"
        c.backward.append(Instr(p.name, (out,), apart, reads, inplace=into))
    c.grads[x.name] = out
