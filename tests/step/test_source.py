"""The generated text: what a reader sees."""

import torch
from small import Residual
from steps import graph_of

from floorplan.step.compile import Schedule, compile_step


def test_the_source_of_a_residual_block() -> None:
    x = torch.randn(2, 3, 8, 8)
    step = compile_step(graph_of(Residual(), x).eval(), "cross_entropy", x, plan=Schedule(branches=()))
    source = step.source
    compile(source, "step.py", "exec")
    assert "LAYOUT = 1  # channels_last" in source
    backward = source[source.index("    def backward_0") : source.index("    return [Stage")]
    code = [line.strip() for line in backward.splitlines() if line.strip() and "#" not in line]
    assert code == [
        "def backward_0(box):",
        "g_proj, q_stem, b_stem, t_region_0, q_conv, n_pool, q_proj, b_proj = box",
        "box.clear()",
        "g_proj_2 = ungate_(g_proj, b_proj, s2.gate)",
        "del b_proj, g_proj",
        "accumulate(s2.U, up_gradient(g_proj_2, q_proj, s2))",
        "del q_proj",
        "g_pool = input_grad(g_proj_2, s2, n_pool, False)",
        "accumulate(s1.U, up_gradient(g_proj_2, q_conv, s1))",
        "del q_conv",
        "g_pool_2 = add_input_grad_(g_pool, g_proj_2, s1, False)",
        "del g_pool, g_proj_2, n_pool",
        "g_stem = region_0.backward(t_region_0, g_pool_2)[0]",
        "del g_pool_2, t_region_0",
        "g_stem_2 = ungate_(g_stem, b_stem, s0.gate)",
        "del b_stem, g_stem",
        "accumulate(s0.U, up_gradient(g_stem_2, q_stem, s0))",
        "del g_stem_2, q_stem",
        "return ()",
    ]
    assert max(len(line) for line in source.splitlines()) < 160


def test_marks_name_every_node_and_change_nothing_else() -> None:
    x = torch.randn(2, 3, 8, 8)
    step = compile_step(graph_of(Residual(), x).eval(), "cross_entropy", x, plan=Schedule(branches=()))
    marked = step._source(True).splitlines()
    assert [line for line in marked if not line.strip().startswith("at(")] == step.source.splitlines()
    assert any("at('stem', 'backward')" in line for line in marked)
