"""Calls of an operator that are like an earlier one: compared in C++, launched by addresses.

What an operator finds out about a call (its layout, its overlaps, its views, its handle, its handle's plan) is the same
for the next call of the same layouts and options. `PreparedCalls` writes out, as one function a kind of call, what is left
to be done then: compare, allocate, launch. docs/results/README.md has what that costs.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

import ninetoothed_patches
from ninetoothed_patches.call_key import any_is_nested, scalar_fits, tensor_guard
from ntops_ext.torch import _checks

# How many kinds of calls an operator compares a call with before it goes the whole way.
_MAX_RECENT = 4

_SOURCE = """\
def call({parameters}):
    try:
        if not (
            {conditions}
        ):
            return None
    except __Exception:
        # What is no tensor, or none that can be asked: the whole way says so.
        return None

    {read_addresses}
    {check_addresses}
    {allocate}

    if not __repeat({launched_addresses}):
        return None

    {mark_as_written}

    return {result}
"""

# Addresses that were met before cost less to look up than to compare.
_CHECK_ADDRESSES = """\
if __found.get({addresses}) is not {verdict}:
        if not ({lie_alike}):
            return None

        __remember(__found, {addresses}, {verdict})
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedAddresses:
    """What was found out about a call by the addresses of its tensors.

    It is the same for a call of the same layouts in which each tensor that is written lies to every other as it does in
    this one: at the same distance, or apart.

    :param found: A mapping of the tensors' addresses, in the order of the parameters, to what was found out.
    :param verdict: What was found out about this call: True or False.
    :param remember: A function of `found`, addresses and a verdict that puts it there.
    :param written: The names of the tensors that were compared with all others.
    """

    found: dict
    verdict: bool
    remember: Callable
    written: tuple


def for_result(out, result, *, found, verdict, remember):
    """What `PreparedCalls.prepare` is told of an operator whose one result is `out`, where that is given, or allocated.

    :param out: The argument, or None.
    :param result: What the operator returned.
    :param found: As for `CheckedAddresses`; likewise `verdict` and `remember`.
    """

    if out is None:
        return {"allocated": ("out", result)}

    checked = CheckedAddresses(
        found=found, verdict=verdict, remember=remember, written=("out",)
    )

    return {"checked": checked, "written": ("out",)}


class OfLayout:
    """The prepared calls for one layout of an operator's tensors."""

    def __init__(self):
        self.calls = ()
        self._whole_ways = 0

    def add(self, call):
        self.calls = (call, *self.calls[: _MAX_RECENT - 1])

    def is_due(self):
        """Whether a call that went the whole way is worth a prepared one.

        Not the first of its layout, and then ever more rarely: some calls go the whole way although they were prepared
        for, because what is written lies otherwise to the other tensors.
        """

        self._whole_ways += 1

        return self._whole_ways > 1 and self._whole_ways.bit_count() == 1


class PreparedCalls:
    """The prepared calls of one operator.

    `recent` are functions of the operator's arguments, by position, that return the operator's result, or None where the
    call is not like theirs: then nothing was launched. They are compared with first.

    :param parameters: The names of the operator's parameters.
    :param result: What the operator returns, in terms of them.
    :param optional: The names of tensors that may be None.
    """

    def __init__(self, parameters, result, optional):
        self.recent = ()
        self._parameters = parameters
        self._result = result
        self._optional = optional

    def use(self, call):
        """Make `call` the first of the recent ones."""

        others = [other for other in self.recent if other is not call]
        self.recent = (call, *others[: _MAX_RECENT - 1])

    def repeat(self, prepared, arguments):
        """The result of a call, or None if it is like none that was prepared for its layout.

        :param prepared: The `OfLayout` of the call's layout.
        :param arguments: The operator's arguments, by position.
        """

        for call in prepared.calls:
            result = call(*arguments)

            if result is not None:
                self.use(call)

                return result

        return None

    def clear(self):
        self.recent = ()

    def prepare(
        self,
        prepared,
        arguments,
        handle,
        handle_arguments,
        *,
        addressed,
        checked=None,
        allocated=None,
        written=(),
    ):
        """Prepare for calls like one that went the whole way, if that is worth it and can be done.

        :param prepared: The `OfLayout` of the call's layout.
        :param arguments: The arguments of the call, by position.
        :param handle: The handle that was called for it, once.
        :param handle_arguments: What it was called with.
        :param addressed: For each tensor of `handle_arguments` the name of the parameter in whose memory it lies.
        :param checked: The `CheckedAddresses` of the call. None if nothing depends on them.
        :param allocated: The name of a parameter that is None, in whose place a tensor is allocated, and that tensor.
        :param written: The names of the parameters that were given and are written.
        """

        if not prepared.is_due():
            return

        repeat = ninetoothed_patches.repeater(handle, *handle_arguments)

        if repeat is None:
            return

        named = dict(zip(self._parameters, arguments, strict=True))
        tensors = {
            name: argument
            for name, argument in named.items()
            if isinstance(argument, torch.Tensor)
        }
        fits = tensor_guard(list(tensors.values()))

        if fits is None:
            return

        conditions, names = self._likeness(named, tensors, fits)
        names["__repeat"] = repeat

        if written:
            # In one mode the comparison tells tensors of inference mode, which count no versions, from others. But it
            # takes one of them, outside of the mode, for one of the others within.
            names["__is_inference_mode"] = torch.is_inference_mode_enabled
            conditions.append(
                f"__is_inference_mode() is {torch.is_inference_mode_enabled()}"
            )

        addresses = {name: f"__address_{name}" for name in tensors}
        reads = [
            f"{address} = {name}.data_ptr()" for name, address in addresses.items()
        ]
        check = allocate = mark = ""

        if checked is not None:
            lie_alike, numbers = _lie_alike(tensors, addresses, checked.written)
            names |= numbers
            names |= {"__found": checked.found, "__remember": checked.remember}
            check = _CHECK_ADDRESSES.format(
                addresses=f"({', '.join(addresses.values())},)",
                verdict=checked.verdict,
                lie_alike=lie_alike,
            )

        if allocated is not None:
            name, tensor = allocated
            names["__allocate"] = _allocation_like(tensor)
            allocate = f"{name} = __allocate()"
            tensors[name] = tensor
            addresses[name] = f"{name}.data_ptr()"

        counted = [name for name in written if not tensors[name].is_inference()]

        if counted:
            names["__increment_version"] = torch.autograd.graph.increment_version
            mark = f"__increment_version(({', '.join(counted)},))"

        launched = [
            argument
            for argument in handle_arguments
            if isinstance(argument, torch.Tensor)
        ]
        launched_addresses = [
            _address_in(tensors[name], addresses[name], tensor)
            for name, tensor in zip(addressed, launched, strict=True)
        ]
        source = _SOURCE.format(
            parameters=", ".join(self._parameters),
            conditions="\n            and ".join(conditions),
            read_addresses="\n    ".join(reads),
            check_addresses=check,
            allocate=allocate,
            launched_addresses=", ".join(launched_addresses),
            mark_as_written=mark,
            result=self._result,
        )
        exec(_compiled(source), names)
        prepared.add(names["call"])
        self.use(names["call"])

    def _likeness(self, named, tensors, fits):
        """What must be true of a call that is like an earlier one, but for its addresses.

        :param named: The arguments of the earlier call by name.
        :param tensors: Those of them that are tensors.
        :param fits: Their `tensor_guard`.
        :return: Source text of the conditions, in the order to look at them, and what the names in it are.
        """

        names = {
            "__fits": fits,
            "__type": type,
            "__Exception": Exception,
            "__is_grad_enabled": torch.is_grad_enabled,
            "__forward_ad": forward_ad,
        }
        conditions = [
            f"{name} is None" for name, argument in named.items() if argument is None
        ]
        # What tells calls apart at no cost, before tensors are compared.
        conditions += [
            f"{name} is not None" for name in self._optional if name in tensors
        ]

        for name, argument in named.items():
            if argument is not None and name not in tensors:
                names[f"__value_{name}"] = argument
                conditions.append(scalar_fits(name, f"__value_{name}"))

        conditions.append(f"not ({any_is_nested(tensors)})")
        conditions.append(f"__fits({', '.join(tensors)})")
        differentiable = [
            f"{name}.requires_grad"
            for name, tensor in tensors.items()
            if tensor.requires_grad
        ]

        if differentiable:
            # The comparison tells such tensors from others, but not one grad mode from the other.
            conditions.append(
                f"not (__is_grad_enabled() and ({' or '.join(differentiable)}))"
            )

        # Tangents are carried on a level. A private name for what has no public one.
        conditions.append("__forward_ad._current_level < 0")

        return conditions, names


def _lie_alike(tensors, addresses, written):
    """Whether tensors like these, at other addresses, lie to each other as these do.

    :param tensors: A mapping of names to tensors.
    :param addresses: A mapping of their names to source text.
    :param written: The names of those that matter to each other and to all others.
    :return: Source text, and what the names in it are: layouts that differ in numbers alone share it.
    """

    relations, names = [], {}

    for position, first in enumerate(written):
        for second in tensors:
            if second in written[: position + 1]:
                continue

            one, other = tensors[first], tensors[second]

            if one.numel() == 0 or other.numel() == 0:
                continue

            here, there = addresses[first], addresses[second]

            if _checks.lie_apart(one, other):
                names[f"__span_{first}"] = _checks.bytes_spanned(one)
                names[f"__span_{second}"] = _checks.bytes_spanned(other)
                relations.append(
                    f"({here} + __span_{first} <= {there}"
                    f" or {there} + __span_{second} <= {here})"
                )
            else:
                distance = f"__distance_{first}_{second}"
                names[distance] = other.data_ptr() - one.data_ptr()
                relations.append(f"{there} - {here} == {distance}")

    return " and ".join(relations) or "True", names


def _address_in(tensor, address, view):
    """Source text: the address of `view`, in the memory of `tensor`, where that has moved to `address`."""

    if view.numel() == 0:
        return "0"

    offset = view.data_ptr() - tensor.data_ptr()

    return f"{address} + {offset}" if offset else address


@functools.lru_cache(maxsize=256)
def _compiled(source):
    return compile(source, "<generated: prepared call>", "exec")


def _allocation_like(tensor):
    """A function that allocates a tensor of the shape, strides, dtype and device of `tensor`.

    PyTorch's generated code allocates by the first of these, which reads no keywords. It allocates on the current device,
    where `repeat` launches or not at all. It is no public interface.
    """

    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    allocate = getattr(guards, f"_empty_strided_{tensor.device.type}", None)

    if allocate is not None:
        return functools.partial(
            allocate, tuple(tensor.shape), tensor.stride(), tensor.dtype
        )

    return functools.partial(
        torch.empty_strided,
        tuple(tensor.shape),
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
    )
