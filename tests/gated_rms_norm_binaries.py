"""The binaries that calls of `gated_rms_norm` would launch, compiled without a GPU."""

import collections
import re

from ninetoothed_patches import host_driver
from ntops_ext.torch import _gated_rms_norm, _launch


def compile_call(monkeypatch, call, target, **overrides):
    """Triton's compiled kernel of a call whose tensors lie on the CPU."""

    launches = []
    # A test may have changed what is chosen for a layout.
    _gated_rms_norm._layouts_of_calls.clear()

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "runs_kernel", lambda tensor: True)
        patch.setattr(
            _launch,
            "launch",
            lambda handle, device, *args: launches.append((handle, args)),
        )
        call.run(**overrides)

    ((handle, args),) = launches

    return host_driver.compile_call(handle, *args, target=target)


def global_accesses(ptx):
    """How often each kind of load and store of global memory occurs: "ld.v4.b32"."""

    found = re.findall(r"\b(ld|st)\.global(?:\.[A-Za-z]\w+)*?((?:\.v\d)?\.b\d+)", ptx)

    return collections.Counter(operation + width for operation, width in found)


def is_wide(access, num_bytes=16):
    """Whether a load or a store is of so many bytes or more."""

    vector, bits = re.fullmatch(r"\w+?(?:\.v(\d))?\.b(\d+)", access).groups()

    return int(vector or 1) * int(bits) >= 8 * num_bytes


def contractible_sums(ptx):
    """Sums of a product that ptxas may fuse, as the operations that feed the product.

    A sum is listed if an operand of it is a product without a rounding of its own.
    """

    operations = {}
    sums = []

    for name, result, operands in re.findall(
        r"\b((?:add|sub|mul|ex2|fma|neg|div|sqrt|rsqrt|mov|max|min|selp)[\w.]*)\s+"
        r"(%\w+), ([^;]+);",
        ptx,
    ):
        operands = [operand.strip() for operand in operands.split(",")]
        operations[result] = name, operands

        if name in ("add.f32", "sub.f32"):
            sums.append(operands)

    found = []

    for operand in (one for operands in sums for one in operands):
        name, factors = operations.get(operand, ("", []))

        if name == "mul.f32":
            found.append({operations.get(one, ("",))[0] for one in factors})

    return found
