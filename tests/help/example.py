"""The backbones of the examples and a batch for them."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).parents[2] / "examples" / "backbones.py"


def factory(name: str) -> Any:
    """Import `examples/backbones.py:name` by its path, as the command line does."""
    spec = importlib.util.spec_from_file_location("example_backbones", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def window(model: nn.Module, batch: int) -> Tensor:
    """A random batch of the model's own example shape."""
    generator = torch.Generator().manual_seed(1)
    shape: Any = model.example_input_shape
    return torch.randn(batch, *shape, generator=generator)
