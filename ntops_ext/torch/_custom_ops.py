"""Operators as PyTorch's dispatcher knows them: what `torch.compile` and `torch.export` put into their graphs.

Tracing gets here, and calls under modes and transforms. An ordinary eager call goes past the
dispatcher, which costs more than a kernel's launch; what a custom operator does when it runs is
that eager call.
"""

import torch
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("ntops_ext", "DEF")

# Kernels address strides as they are: Inductor must hand over the layouts that eager code
# would, neither copies nor ones of its choice, which could be refused. PyTorch before 2.8
# may have the weaker tag only, by which the order of the strides is that of eager code.
_EXACT_STRIDES = getattr(
    torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order
)


def define(schema, implementation, fake):
    """A custom operator `torch.ops.ntops_ext.NAME`.

    :param schema: Its name, arguments, with what it writes, and results.
    :param implementation: What it does, on every device. Gradients are none of its
        business: it runs without grad mode, below autograd.
    :param fake: What it returns for tensors without data, with the right strides. It raises
        what is wrong with them.
    :return: The operator.
    """

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, _EXACT_STRIDES))

    def run(*args):
        # Below autograd PyTorch cannot even be asked for tangents.
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            return implementation(*args)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ntops_ext::{name}", fake, lib=_LIBRARY)

    return getattr(torch.ops.ntops_ext, name).default


def differentiate(operator, setup_context, backward):
    """Give a custom operator its gradients. See `torch.library.register_autograd`."""

    torch.library.register_autograd(
        operator.name(), backward, setup_context=setup_context, lib=_LIBRARY
    )
