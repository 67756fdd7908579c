"""GPU operators written in the NineToothed DSL, as an extension of ntops.

Importing this package imports neither NineToothed nor Triton and needs no GPU: its parts are imported when they
are first used.
"""

import importlib

from ntops_ext.registry import register, unregister

__version__ = "0.1.0"

__all__ = [
    "configs",
    "kernels",
    "nn",
    "reference",
    "register",
    "torch",
    "unregister",
]


def __getattr__(name):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
