"""What operators keep from call to call, so that a call pays for a look-up."""

import operator

import torch
from torch.autograd import forward_ad

from ntops_ext.torch import _checks

# A program that meets more layouts forgets all of them and checks anew.
_MAX_REMEMBERED = 4096

# Addresses recur where an allocator caches, but nothing says how many there are. They are
# bounded over all layouts of an operator: a call's are 180 bytes where they are two.
_MAX_ADDRESSES = 16384

# In C, because every call pays for it.
_describe = operator.attrgetter("shape", "dtype", "device", "layout")
_requires_grad = operator.attrgetter("requires_grad")


class Layouts:
    """What was found out about layouts, so that a call pays for a look-up.

    :param names: What the operator's tensors are called.
    :param optional: Which of them may be absent.
    :param check: Takes the tensors of a call whose layout is new, and its options. It raises
        what is wrong with it, or returns what is to be kept.
    """

    def __init__(self, names, optional, check):
        self._names = names
        self._optional = frozenset(optional)
        self._check = check
        self._kept = {}
        # For each call whose addresses are remembered, the dict that they are in.
        self._found = []

    def get(self, mode, tensors, arguments, *options):
        """What is kept about the layout of a call.

        :param mode: Tells apart calls of which different tensors are present, or the options
            of which differ.
        :param tensors: The tensors that are present.
        :param arguments: All of them, with None for those that are not.
        :param options: What else `check` takes.
        :raises TypeError: If an argument is not a dense tensor.
        """

        try:
            key = (
                mode,
                *map(_describe, tensors),
                *map(torch.Tensor.stride, tensors),
            )
            kept = self._kept.get(key)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            # What has no shape is no tensor, what has no strides is no dense one, and what
            # has no hash is no option: the error to raise is the one that names it. NumPy's
            # durations without a unit raise a ValueError.
            self._check_kinds(arguments)
            self._check(*arguments, *options)

            raise

        if kept is None:
            self._check_kinds(arguments)
            kept = self._check(*arguments, *options)

            if len(self._kept) >= _MAX_REMEMBERED:
                self.clear()

            self._kept[key] = kept

        return kept

    def _check_kinds(self, arguments):
        for name, argument in zip(self._names, arguments, strict=True):
            if argument is not None or name not in self._optional:
                _checks.check_tensor(name, argument)

    def remember_addresses(self, found, addresses, verdict):
        """Put what was found out about a call's addresses into a dict of its layout.

        Where there are too many, those of all layouts are forgotten.
        """

        if len(self._found) >= _MAX_ADDRESSES:
            self._forget_addresses()

        self._found.append(found)
        found[addresses] = verdict

    def _forget_addresses(self):
        for found in self._found:
            found.clear()

        self._found.clear()

    def clear(self):
        self._kept.clear()
        # A prepared call outlives its layout, with the addresses that were met.
        self._forget_addresses()


def requires_grad(tensors):
    """Whether autograd would have to record what is made of these tensors, or to carry on
    their tangents (forward mode)."""

    if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
        return True

    return is_in_forward_mode() and carries_tangents(tensors)


def is_in_forward_mode():
    """Whether tangents could be carried at all."""

    # Private names for what has no public ones: whether a dual level is entered, and whether it counts here.
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def check_can_be_saved(names, arguments):
    """Refuse tensors that autograd cannot keep for a backward pass.

    :param names: What the arguments are called; those that are absent are None.
    :raises ValueError: If one was made in inference mode, where autograd would record the call.
    """

    if not torch.is_grad_enabled():
        return

    for name, argument in zip(names, arguments, strict=True):
        if argument is not None and argument.is_inference():
            raise ValueError(
                f"`{name}` was made in inference mode, and cannot be saved for the backward"
                f" pass of a call that autograd records: pass `{name}.clone()`, or use"
                f" torch.no_grad()."
            )


def check_writable(names, written):
    """Refuse what PyTorch's own operators would refuse to write, some of it after the first write.

    :raises ValueError: If a tensor was made in inference mode, outside of which this is.
    """

    for name, tensor in zip(names, written, strict=True):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"`{name}` is an inference tensor, which PyTorch writes under"
                f" torch.inference_mode() only."
            )


def carries_tangents(tensors):
    """Whether forward-mode autograd would have to carry on tangents of these tensors."""

    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def mark_as_written(*tensors):
    """Tell autograd, which sees no kernel of ours, that tensors were written.

    A value that it has saved for a backward pass is then reported, not used. Inference
    tensors count no versions.
    """

    if any(map(torch.Tensor.is_inference, tensors)):
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]

    torch.autograd.graph.increment_version(tensors)
