"""A tensor that wraps another one."""

import torch
from torch.utils._pytree import tree_map


class Wrapper(torch.Tensor):
    """Holds its elements in another tensor, as `DTensor` and quantised tensors do, and has no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, cls) else value

        def wrap(value):
            return cls(value) if isinstance(value, torch.Tensor) else value

        return tree_map(
            wrap, function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        )
