"""`rewrite`'s report as it is printed, and its Markdown."""

import torch
from expecttest import assert_expected_inline
from small import Residual, Smooth

import floorplan


def test_a_rewrite_as_it_is_printed() -> None:
    report = floorplan.rewrite(Residual(), torch.randn(2, 3, 16, 16)).report
    assert_expected_inline(
        str(report),
        """\
figure (bytes)                              before    measured    after    measured    ratio
----------------------------------------  --------  ----------  -------  ----------  -------
saved (distinct storages)                   61,888      61,888    7,428       7,428   0.1200
saved (once per op)                         88,512      88,512    7,428       7,428   0.0839
saved (live storages)                       61,888      61,888    7,428       7,428   0.1200
training-state peak                         82,176      82,176   19,852      19,852   0.2416
requested peak of the step                  78,404      78,404   39,856      39,856   0.5083
total (step + model + optimizer + batch)   104,496     104,496   58,300      58,300   0.5579
trainable parameters                         1,645       1,645      464         464   0.2821

pillar           kept before    kept after
-------------  -------------  ------------
activation            24,576             0
normalization         24,768             0
convolution            4,096             0
pooling                8,192             0
adapter                    0         6,144
gate                       0         1,284
other                    256             0

verdict: ABOVE_FLOOR -> AT_FLOOR""",
    )


def test_a_rewrite_as_markdown() -> None:
    report = floorplan.rewrite(Smooth(), torch.randn(2, 3, 16, 16), measured=False).report
    assert_expected_inline(
        report.markdown(),
        """\
# Smooth, adapted

| figure (bytes)                           |   before |   measured |   after |   measured |   ratio |
|------------------------------------------|----------|------------|---------|------------|---------|
| saved (distinct storages)                |   12,544 |          - |  16,640 |          - |  1.3265 |
| saved (once per op)                      |   18,688 |          - |  16,640 |          - |  0.8904 |
| saved (live storages)                    |   12,544 |          - |  16,640 |          - |  1.3265 |
| training-state peak                      |   15,232 |          - |  19,288 |          - |  1.2663 |
| requested peak of the step               |   37,640 |          - |  41,736 |          - |  1.1088 |
| total (step + model + optimizer + batch) |   46,472 |          - |  50,528 |          - |  1.0873 |
| trainable parameters                     |      224 |          - |     144 |          - |  0.6429 |

| pillar     |   kept before |   kept after |
|------------|---------------|--------------|
| activation |        12,544 |       12,544 |
| adapter    |             0 |        4,096 |

| pass       | left alone   | because                                                                                                                                       |
|------------|--------------|-----------------------------------------------------------------------------------------------------------------------------------------------|
| pack_gates | act          | SiLU cannot be gated, its derivative is a curve, not two values; recompute it exactly, keep a few-bit derivative (lossy), or train with ReLU6 |

| above the floor   | op   | shape           | bytes   | what would remove it                                                                                                                |
|-------------------|------|-----------------|---------|-------------------------------------------------------------------------------------------------------------------------------------|
| act               | SiLU | [B, C1, H1, W1] | 12,544  | if it is piecewise linear, `floorplan rewrite` keeps one bit; a smooth one needs exact recomputation or a labelled lossy derivative |

verdict: ABOVE_FLOOR -> ABOVE_FLOOR
""",  # noqa: E501
    )
