"""Derivatives of smooth activations, as torch takes them, kinks included: functions of float64 arrays."""

import math
from collections.abc import Callable

import numpy as np

from floorplan.layers.levels import Floats

Derivative = Callable[[Floats], Floats]
Known = tuple[Derivative, float, tuple[float, ...]]  # how far from 0 it still changes, and where it may jump
FAR = 20.0  # beyond it the derivatives are what they are at infinity, to eight digits
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _logistic(z: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def _gelu(z: Floats) -> Floats:
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return np.asarray(0.5 * (1.0 + _erf(z / math.sqrt(2.0))) + z * density)


def _gelu_tanh(z: Floats) -> Floats:
    k = math.sqrt(2.0 / math.pi)
    t = np.tanh(k * (z + 0.044715 * z**3))
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * k * (1.0 + 3 * 0.044715 * z * z)


def _mish(z: Floats) -> Floats:
    t = np.tanh(np.logaddexp(0.0, z))
    return t + z * (1.0 - t * t) * _logistic(z)


def _plain(derivative: Derivative, *jumps: float) -> Callable[[], Known]:
    return lambda: (derivative, FAR, jumps)


mish = _plain(_mish)
silu = _plain(lambda z: _logistic(z) * (1.0 + z * (1.0 - _logistic(z))))
hardswish = _plain(lambda z: np.where(z <= -3.0, 0.0, np.where(z < 3.0, z / 3.0 + 0.5, 1.0)), -3.0, 3.0)
sigmoid = _plain(lambda z: _logistic(z) * (1.0 - _logistic(z)))
tanh = _plain(lambda z: 1.0 - np.tanh(z) ** 2)


def gelu(approximate: str = "none") -> Known:
    """Of GELU."""
    return (_gelu_tanh if approximate == "tanh" else _gelu), FAR, ()


def elu(alpha: float = 1.0) -> Known:
    """Of ELU."""
    return lambda z: np.where(z > 0.0, 1.0, alpha * np.exp(np.minimum(z, 0.0))), FAR, (0.0,)


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Known:
    """Of Softplus."""
    reach = FAR * max(1.0, 1.0 / abs(beta), abs(threshold / beta) / FAR * 1.1)
    return lambda z: np.where(z * beta > threshold, 1.0, _logistic(beta * z)), reach, (threshold / beta,)
