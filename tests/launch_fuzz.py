"""Random calls and what happens between them; and a session in which a planned handle does what its unpatched twin does.

What happens is a list of steps, made of numbers and names alone, that says nothing of how it turned out: a list that
failed can be cut down, written into `launch_fuzz_corpus.json`, and be done again.

- `call`: a handle, the way the call is written, the autograd mode, and the arguments;
- `operator`: an operator of ours, which may repeat a call that was prepared; `ntops`: an operator of ntops;
- `slot` and those that end in an underscore, `data`: a tensor that stays between calls is made anew (where its identity
  may be that of the former) or changed in place;
- `repeater`, `repeat`: `ninetoothed_patches.repeater` of a call, and its use at new addresses;
- all others: plans are dropped, kernels forgotten, hooks installed, another device is current, and so on.
"""

import collections
import contextlib
import enum
import functools
import gc
import importlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import types
import zlib

import launch_fuzz_kernels
import ninetoothed
import numpy as np
import torch
import triton
from huge_storage import reserve
from launch_helpers import applied
from launch_kernels import FACTOR
from operator_calls import LAYOUTS, MODULES, forget, launching_cpu_tensors
from recording_driver import SM_80, SM_90, RecordingDriver, active
from triton.backends import backends
from triton.compiler.compiler import ASTSource

import ninetoothed_patches
import ntops_ext
from ninetoothed_patches import triton_abi
from ntops_ext import _handles

KERNELS = launch_fuzz_kernels.KERNELS

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "bool": torch.bool,
    "c64": torch.complex64,
}


class Precision(enum.IntEnum):
    """What ntops passes as constants."""

    TF32 = 1
    IEEE = 2


# By name, because equal ones are to be told apart, and NaN is not equal to itself.
SCALARS = {
    "0.0": 0.0,
    "-0.0": -0.0,
    "0.5": 0.5,
    "1.0": 1.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "subnormal": 5e-324,
    "0": 0,
    "1": 1,
    "2": 2,
    "15": 15,
    "16": 16,
    "17": 17,
    "-1": -1,
    "-16": -16,
    "2**31-1": 2**31 - 1,
    "2**31": 2**31,
    "-2**31": -(2**31),
    "2**32": 2**32,
    "2**63-1": 2**63 - 1,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**63": -(2**63),
    "true": True,
    "false": False,
    "none": None,
    "text": "text",
    "enum": Precision.IEEE,
    "float64": np.float64(0.5),
    "float32": np.float32(0.5),
    "int64": np.int64(2),
    "numpy bool": np.bool_(True),
    "list": [0.5],
    "object": types.SimpleNamespace(),
    "dtype": torch.float16,
}

_USUAL_SCALARS = ["0.5", "0.5", "1.0", "0.0", "-0.0", "2", "1", "16", "17", "true"]


_UNEQUAL_SCALARS = ["0.5", "true", "2", "0.5", "16", "-1", "0.0", "nan", "text"]


class Subclass(torch.Tensor):
    """A subclass that changes nothing."""


class Difference(AssertionError):
    """A planned call did something else than its twin."""


# Tensors, from what describes them: dtype, shape, strides, offset in elements, kind.


@functools.cache
def _reserved():
    return reserve(2**33, torch.uint8)


def make_tensor(dtype, shape, strides, offset, kind):
    dtype = DTYPES[dtype]
    span = offset + 1

    if 0 not in shape:
        span += sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
        )

    if kind == "meta":
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    if kind == "huge":
        # Strides past 2^31: of memory that is only touched where somebody writes.
        buffer = _reserved().view(dtype)
    else:
        buffer = torch.empty(max(span, 1), dtype=dtype, device="cpu")

    if kind == "inference":
        with torch.inference_mode():
            buffer = torch.empty(max(span, 1), dtype=dtype, device="cpu")
            return buffer.as_strided(shape, strides, offset)

    tensor = buffer.as_strided(shape, strides, offset)

    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)

    if kind == "leaf":
        return tensor.requires_grad_()

    if kind == "subclass":
        return tensor.as_subclass(Subclass)

    return torch._neg_view(tensor) if kind == "negative" else tensor


def dense_strides(shape):
    strides, stride = [], 1

    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)

    return strides


def draw_tensor(generator, shape, dtype=None, *, is_odd=True):
    """One description of a tensor of this shape."""

    shape = list(shape)
    dtype = dtype or generator.choice(["bf16", "bf16", "fp16", "fp32"])
    strides, offset, kind = dense_strides(shape), 0, "plain"
    layout = generator.choices(
        ["dense", "padded", "odd", "offset", "aligned offset", "expanded", "columns"]
        + ["every second", "kind", "rare"],
        [8, 1, 1, 2, 2, 1, 1, 1, 4, 1 if is_odd else 0],
    )[0]

    if layout in ("padded", "odd") and len(shape) > 1:
        step = strides[-2] * 2 if layout == "padded" else strides[-2] + 3
        strides = [*dense_strides([*shape[:-1], 1]), 1]
        strides[:-1] = [stride * step for stride in dense_strides(shape[:-1])]
    elif layout == "offset":
        offset = generator.choice([1, 3, 7])
    elif layout == "aligned offset":
        offset = generator.choice([8, 16, 32])
    elif layout == "expanded":
        strides[0] = 0
    elif layout == "columns":
        strides = list(reversed(dense_strides(shape[::-1])))
    elif layout == "every second":
        strides = [2 * stride for stride in strides]
    elif layout == "kind":
        kind = generator.choice(["parameter", "leaf", "inference", "negative"])
    elif layout == "rare":
        rare = generator.choice(["huge", "fp64", "int32", "one"])

        if rare == "huge" and len(shape) > 1 and 0 < shape[0] <= 4:
            kind, strides[0] = "huge", 2**29 + 16
        elif rare in ("fp64", "int32"):
            dtype = rare
        elif rare == "one":
            # The stride of a dimension of size 1 moves nothing, but reaches the kernel.
            shape[0], strides[0] = 1, 1 if strides[0] != 1 else 48

    return ["tensor", dtype, shape, strides, offset, kind]


def odd_tensor(generator, description):
    """The same with something that no plan is made for, or that the kernel does not take."""

    _, dtype, shape, strides, offset, kind = description
    oddity = generator.choice(["meta", "subclass", "subclass", "rank", "scalar"])

    if oddity == "rank":
        shape, strides = [1, *shape], [17, *strides]
    elif oddity == "scalar":
        shape, strides = [], []
    else:
        kind = oddity

    return ["tensor", dtype, shape, strides, offset, kind]


# Arguments of a kernel's calls.


def draw_arguments(generator, kernel):
    sizes = [16, 16, 64, 100, 5, 1, 0]
    last = kernel.last_size or generator.choice([64, 64, 128, 100, 1, 0])
    rows, batch = generator.choice(sizes), generator.choice([1, 2, 3])
    inner = generator.choice([16, 32, 40])
    dtype = generator.choice([None, "bf16", "bf16", "fp32"])
    arguments = []

    for name, ndim in kernel.parameters:
        if ndim == 0:
            arguments.append(draw_scalar(generator, kernel))
            continue

        if kernel.shapes == "product":
            shape = {"x": [rows, inner], "y": [inner, last], "o": [rows, last]}[name]
        elif kernel.shapes == "reduced":
            shape = [rows, last] if ndim == 2 else [rows]
        else:
            shape = [batch, rows, last][-ndim:]

            if ndim == 1:
                shape = [generator.choice([0, 1, 16, 100, 128, 1000])]

        arguments.append(draw_tensor(generator, shape, dtype))

    return arguments


def draw_scalar(generator, kernel, *, is_rare=False):
    if kernel.is_constexpr or kernel.is_tuned:
        # No two that are equal: Triton takes the kernel, or the choice, of the one that came first for the other, and
        # that may have been another one for the twin.
        return [
            "scalar",
            generator.choice(_UNEQUAL_SCALARS[: 3 if kernel.is_constexpr else None]),
        ]

    if is_rare or generator.random() < 0.1:
        return ["scalar", generator.choice(list(SCALARS))]

    return ["scalar", generator.choice(_USUAL_SCALARS)]


# Arguments of our operators' calls, by name.


def _of(shape, generator, dtype, *, spare=0.5):
    """A tensor of heads or rows: dense, with padded rows, misaligned, or a leaf."""

    described = ["tensor", dtype, list(shape), dense_strides(shape), 0, "plain"]

    if generator.random() < spare:
        form = generator.choice(["padded", "offset", "leaf", "inference", "parameter"])

        if form == "padded" and len(shape) > 1:
            step = dense_strides(shape)[0] + 16
            described[3] = [step, *dense_strides(shape)[1:]]
        elif form == "offset":
            described[4] = generator.choice([1, 8])
        elif form not in ("padded", "offset"):
            described[5] = form

    return described


def draw_gated_rms_norm(generator):
    rows, columns = generator.choice([0, 1, 6, 6, 16]), generator.choice([64, 128, 128])
    dtype, other = generator.choice(["bf16", "bf16", "fp32"]), "fp32"
    shape = generator.choice([[rows, columns], [2, rows, columns]])
    arguments = {"input": _of(shape, generator, dtype)}
    choice = generator.random()

    if choice < 0.7:
        arguments["weight"] = _of(
            [columns], generator, generator.choice([dtype, other])
        )

    if choice > 0.2:
        arguments["gate"] = _of(shape, generator, dtype)

    if generator.random() < 0.2:
        arguments["bias"] = _of([columns], generator, other)

    out = generator.choice(["none", "none", "own", "input", "wrong"])

    if out == "own":
        arguments["out"] = _of(shape, generator, dtype, spare=0.2)
    elif out == "input":
        arguments["out"] = ["same", "input"]
    elif out == "wrong" and generator.random() < 0.1:
        arguments["out"] = ["same", "gate" if choice > 0.2 else "input"]

    for name, values, wrong_values in (
        ("eps", ["0.0", "1", "float64", "0.5"], ["true", "nan"]),
        ("group_size", ["none", "16", "int64"], ["1.0", "true", "17"]),
        ("norm_before_gate", ["false", "true"], ["1", "numpy bool"]),
        ("weight_offset", ["0.0", "-0.0", "1.0", "1"], ["true", "none"]),
    ):
        if generator.random() < 0.15:
            is_wrong = generator.random() < 0.15
            value = generator.choice(wrong_values if is_wrong else values)
            arguments[name] = ["scalar", value]

    if generator.random() < 0.15:
        names = ["sigmoid", "sigmoid", "swish", "swish", "gelu"]
        arguments["activation"] = ["text", generator.choice(names)]

    return arguments


def draw_qk_norm_rope(generator):
    tokens, heads, width = generator.choice([0, 1, 5]), generator.choice([1, 4]), 64
    dtype = generator.choice(["bf16", "fp32"])
    shape = [generator.choice([1, 2]), tokens, heads, width]
    arguments = {
        "input": _of(shape, generator, dtype),
        "weight": _of([width], generator, dtype, spare=0.2),
        "rope": _of([tokens, width // 2], generator, "c64", spare=0.2),
    }
    out = generator.choice(["none", "own", "input"])

    if out == "own":
        arguments["out"] = _of(shape, generator, dtype)
    elif out == "input":
        arguments["out"] = ["same", "input"]

    if generator.random() < 0.2:
        arguments["eps"] = ["scalar", generator.choice(["0.5", "1", "true", "-1"])]

    return arguments


def draw_qk_norm_rope_pack(generator):
    batch, tokens, prefix = 1, generator.choice([0, 1, 5]), generator.choice([0, 3])
    heads, width, dtype = generator.choice([2, 4]), 64, "bf16"
    packed = [batch, prefix + tokens, 2, width]
    arguments = {"q": _of([batch, tokens, heads, width], generator, dtype, spare=0.2)}

    for name, shape in {
        "k_out": packed,
        "v_out": packed,
        "q_weight": [width],
        "k_weight": [width],
        "rope": [tokens, width // 2],
        "k_prefix": [batch, prefix, 2, width],
        "v_prefix": [batch, prefix, 2, width],
    }.items():
        kind = "c64" if name == "rope" else dtype
        arguments[name] = _of(shape, generator, kind, spare=0.1)

    if generator.random() < 0.3:
        for name in "kv":
            arguments[f"{name}_prefix"] = ["rows", f"{name}_out", 0, prefix]

    for name in "kv":
        if generator.random() < 0.5:
            arguments[f"{name}_src"] = _of(
                [batch, tokens, 2, width], generator, dtype, spare=0.1
            )

    return arguments


OPERATORS = {
    "gated_rms_norm": draw_gated_rms_norm,
    "qk_norm_rope": draw_qk_norm_rope,
    "qk_norm_rope_pack_": draw_qk_norm_rope_pack,
}


# Arguments of ntops' operators: positional ones, then keywords.


def _ntops_elementwise(num_tensors, *scalars, **keywords):
    def draw(generator):
        shape = generator.choice([[16, 64], [100], [2, 3, 40], [1, 16], [0, 5]])
        dtype = generator.choice(["fp16", "fp32", "bf16"])
        tensors = [
            draw_tensor(generator, shape, dtype, is_odd=False)
            for _ in range(num_tensors)
        ]
        given = [["scalar", generator.choice(choices)] for choices in scalars]
        named = {
            name: ["scalar", generator.choice(choices)]
            for name, choices in keywords.items()
            if generator.random() < 0.5
        }

        return [*tensors, *given], named

    return draw


def _ntops_products(*shapes):
    def draw(generator):
        sizes = dict(
            zip("bmnk", (2, *generator.choices([16, 32, 48], k=3)), strict=True)
        )
        dtype = generator.choice(["fp16", "fp32"])

        return [
            draw_tensor(generator, [sizes[name] for name in shape], dtype, is_odd=False)
            for shape in shapes
        ], {}

    return draw


_NUMBERS = ["0.5", "2", "1", "true", "16"]

NTOPS = {
    **{
        name: _ntops_elementwise(1)
        for name in ("abs", "cos", "exp", "gelu", "isnan", "neg", "relu", "rsqrt")
    },
    **{name: _ntops_elementwise(1) for name in ("sigmoid", "silu", "sin", "tanh")},
    **{name: _ntops_elementwise(2) for name in ("div", "eq", "gt", "mul", "pow")},
    "add": _ntops_elementwise(2, alpha=_NUMBERS),
    "sub": _ntops_elementwise(2, alpha=_NUMBERS),
    "clamp": _ntops_elementwise(3),
    "dropout": _ntops_elementwise(1, ["0.5"]),
    "softmax": _ntops_elementwise(1, ["-1"]),
    "mm": _ntops_products("mk", "kn"),
    "bmm": _ntops_products("bmk", "bkn"),
    "addmm": _ntops_products("mn", "mk", "kn"),
}


# What happens.

_FORMS = ["positional"] * 5 + ["keywords", "reversed", "mixed"]
_WRONG_FORMS = ["missing", "surplus", "unknown", "doubled"]
_MODES = ["grad", "grad", "no_grad", "inference"]
_WAYS = ["planned"] * 6 + ["applied", "made"]

_EVENTS = {
    "clear": 4,
    "hook": 2,
    "pre_run_hook": 1,
    "stream": 4,
    "device": 3,
    "default_device": 2,
    "remake": 4,
    "forget_kernels": 1,
    "forget_tuning": 1,
    "launch_error": 2,
    "collect": 1,
    "constant": 1,
    "forget_operators": 1,
    "repeater": 6,
    "repeat": 30,
}


class Steps:
    """A generator of steps.

    :param seed: What decides all of them.
    :param kernels: The names of the kernels to call.
    :param variety: How many layouts of a kernel's calls there are; most need a kernel of their own.
    :param layouts: What decides the layouts: seeds with the same ones need the same kernels.
    :param operators: The names of our operators to call.
    :param ntops: The names of those of ntops.
    :param share_of_gradients: How often gradients are asked for, too: their kernels take seconds to make.
    """

    SUBJECTS = 2

    def __init__(
        self,
        seed,
        *,
        kernels,
        variety,
        layouts=0,
        operators=(),
        ntops=(),
        share_of_gradients=0.1,
    ):
        self._share_of_gradients = share_of_gradients
        self._random = random.Random(seed)
        self._layouts = layouts
        self._pools = {}
        self._kernels = [
            *(("call", name) for name in kernels),
            # Each has several kernels.
            *(("operator", name) for name in operators for _ in range(4)),
            *(("ntops", name) for name in ntops),
        ]
        self._variety = variety
        self._slots = {}
        self._num_repeaters = 0
        self._hooked = []

    def take(self, num_calls):
        """Steps, of which so many are calls."""

        left = num_calls

        while left > 0:
            for step in self._run_of_one():
                left -= step[0] in ("call", "operator", "ntops")

                yield step

                if left == 0:
                    return

    def _run_of_one(self):
        choose = self._random
        kind, name = choose.choice(self._kernels)
        length = choose.choice([1, 3, 10, 40])

        if kind == "call" and choose.random() < 0.1:
            yield from self._burst(name)

            return

        recent = choose.choices(self._pool(kind, name), k=3)

        for _ in range(length):
            if choose.random() < 0.1:
                yield from self._event(kind, name)

            if self._hooked and choose.random() < 0.3:
                yield ["unhook", self._hooked.pop()]

            pool = recent if choose.random() < 0.8 else self._pool(kind, name)
            arguments = choose.choice(pool)

            if kind == "call":
                yield from self._call(name, arguments)
            elif kind == "operator":
                mode = choose.choice(_MODES)
                is_backward = choose.random() < self._share_of_gradients

                yield [kind, name, mode, arguments, is_backward]
            else:
                yield [kind, name, choose.choice(_MODES), *arguments]

    def _pool(self, kind, name):
        if (kind, name) not in self._pools:
            self._pools[kind, name] = list(self._draw_pool(kind, name))

        return self._pools[kind, name]

    def _draw_pool(self, kind, name):
        choose = random.Random(f"{self._layouts} {kind} {name}")

        if kind == "operator":
            # Layouts that need no kernel of their own are many.
            for _ in range(4 * self._variety):
                yield OPERATORS[name](choose)

            return

        if kind == "ntops":
            for _ in range(max(self._variety // 3, 1)):
                yield NTOPS[name](choose)

            return

        kernel = KERNELS[name]
        pool = []
        variety = max(self._variety // 2, 2) if kernel.is_tuned else self._variety

        for _ in range(variety):
            arguments = draw_arguments(choose, kernel)

            if pool and choose.random() < 0.6:
                # What differs from another in one argument.
                other = list(choose.choice(pool))
                position = choose.randrange(len(other))
                other[position] = arguments[position]
                arguments = other

            pool.append(arguments)

        yield from pool

    def _call(self, name, arguments):
        choose, kernel = self._random, KERNELS[name]
        arguments = list(arguments)
        tensors = [index for index, (_, ndim) in enumerate(kernel.parameters) if ndim]
        scalars = [
            index for index, (_, ndim) in enumerate(kernel.parameters) if not ndim
        ]

        if scalars and choose.random() < 0.15:
            arguments[choose.choice(scalars)] = draw_scalar(
                choose, kernel, is_rare=choose.random() < 0.1
            )

        if choose.random() < 0.05:
            first, second = tensors[0], tensors[-1]

            if first < second:
                arguments[second] = ["same", first]

        if choose.random() < 0.2:
            position = tensors[self._layouts % len(tensors)]
            yield from self._use_slot(name, position, arguments)

        if choose.random() < 0.02:
            position = choose.choice(tensors)

            if arguments[position][0] == "tensor":
                arguments[position] = odd_tensor(choose, arguments[position])

        if choose.random() < 0.005:
            arguments[choose.choice(tensors)] = ["scalar", choose.choice(list(SCALARS))]

        form = choose.choice(_WRONG_FORMS if choose.random() < 0.01 else _FORMS)
        subject = choose.randrange(self.SUBJECTS)

        yield ["call", name, subject, form, choose.choice(_MODES), arguments]

    def _use_slot(self, name, position, arguments):
        """A tensor that stays between calls, in an argument's place; it changes now and then."""

        choose = self._random
        slot = f"{name} {position}"
        described = choose.choice(self._pools["call", name])[position]

        if described[0] != "tensor":
            return

        if slot not in self._slots or choose.random() < 0.3:
            change = choose.choice(
                ["slot", "slot", "set_", "data", "resize_", "as_strided_", "transpose_"]
            )

            if slot not in self._slots:
                change = "slot"

            self._slots[slot] = True

            yield [change, slot, described]

        arguments[position] = ["slot", slot]

    def _burst(self, name):
        """Calls of which none comes back, as with a seed for a scalar; and then some that do."""

        choose, kernel = self._random, KERNELS[name]
        arguments = list(choose.choice(self._pool("call", name)))
        scalars = [
            index for index, (_, ndim) in enumerate(kernel.parameters) if not ndim
        ]
        subject = choose.randrange(self.SUBJECTS)
        made = []

        for _ in range(choose.choice([18, 20, 40])):
            arguments = list(arguments)

            if scalars and not kernel.is_constexpr:
                arguments[scalars[0]] = ["number", choose.random()]
            elif scalars or kernel.is_tuned or kernel.last_size is None:
                arguments = choose.choice(self._pool("call", name))
            else:
                rows = choose.randrange(2, 60)
                arguments = [
                    ["tensor", "bf16", *_resized(described, rows), 0, "plain"]
                    if described[0] == "tensor"
                    else described
                    for described in arguments
                ]

            made.append(arguments)

            yield ["call", name, subject, "positional", "grad", arguments]

            if choose.random() < 0.05:
                yield from self._event("call", name)

        for arguments in choose.choices(made[-4:], k=6):
            yield ["call", name, subject, "positional", "grad", arguments]

    def _event(self, kind, name):
        choose = self._random
        event = choose.choices(list(_EVENTS), _EVENTS.values())[0]
        subject = choose.randrange(self.SUBJECTS)

        if event == "hook":
            self._hooked.append(choose.choice(["enter", "exit"]))

            yield [event, self._hooked[-1]]
        elif event == "stream":
            yield [event, choose.choice([0, 7, 9, 2**47])]
        elif event == "device":
            yield [event, choose.choice([0, 0, 1])]
        elif event == "default_device":
            yield [event, choose.choice(["none", "cpu", "meta"])]
        elif event in ("clear", "launch_error", "collect", "forget_operators"):
            yield [event]
        elif kind != "call":
            return
        elif event == "pre_run_hook":
            yield [event, name]
            yield from self._call(name, choose.choice(self._pool(kind, name)))
            yield [event, name]
        elif event == "remake":
            bound = choose.choice([1, 2, 3, 16, 1024])

            yield [event, name, subject, choose.choice(_WAYS), bound]
        elif event == "constant":
            yield [event, 2]
            yield from self._call(name, choose.choice(self._pool(kind, name)))
            yield [event, 3]
        elif event == "repeater":
            self._num_repeaters += 1
            arguments = choose.choice(self._pool(kind, name))
            yield ["call", name, subject, "positional", "grad", arguments]
            yield [event, name, subject, arguments]

            for shift in (0, choose.choice([0, 1, 8]), 0):
                yield ["repeat", -1, shift]
        elif event == "repeat" and self._num_repeaters:
            shift = choose.choice([0, 0, 0, 1, 8])
            yield [event, choose.randrange(min(self._num_repeaters, 16)), shift]
        elif event in ("forget_kernels", "forget_tuning"):
            yield [event, name, subject]


def _resized(described, rows):
    shape = [rows, *described[2][1:]]

    return shape, dense_strides(shape)


# Handles. NineToothed takes a second to write a kernel's source: that is done once, and read for each handle.

_originals = {}


def fresh_handle(key, make):
    """A handle as NineToothed makes it, of a kernel that was made before, if there was one of this key."""

    if key not in _originals:
        _originals[key] = make()

    original = _originals[key]
    kernel, launch = original._kernel.__name__, original._launch.__name__
    module = ninetoothed.jit.__globals__["import_from_path"](
        original._source, original._source
    )

    for name, value in original._launch.__globals__.items():
        # What a test has put there.
        vars(module).setdefault(name, value)

    return type(original)(vars(module)[kernel], vars(module)[launch], original._source)


# Doing it.


class Session:
    """Handles with plans beside their unpatched twins, in one process, under one recording driver.

    `counts` counts what was done. Use it as a context manager: it puts everything back that it changed.
    """

    def __init__(self, driver):
        self.driver = driver
        self.counts = collections.Counter()
        self.reasons = collections.Counter()
        self._twins = {}
        self._subjects = {}
        self._slots = {}
        self._repeaters = collections.deque(maxlen=16)
        self._handles_of_ntops = {}
        self._hooks = {}
        self._seen = []
        self._pre_run_hooks = set()
        self._is_to_fail = False
        self._restore = contextlib.ExitStack()

    def __enter__(self):
        self._restore.enter_context(launching_cpu_tensors())
        self._restore.callback(setattr, _handles, "_make", _handles._make)
        self._restore.callback(self._forget_operators)
        self._restore.callback(lambda: [self._unhook(kind) for kind in [*self._hooks]])
        self._restore.callback(torch.set_default_device, None)
        self._restore.callback(self._constant, 3)
        self._forget_operators()

        return self

    def __exit__(self, *exception):
        with self._restore:
            for (name, subject), (handle, made) in self._subjects.items():
                self._retire(name, subject, handle, made)

    def run(self, steps):
        for step in steps:
            self.do(step)

        return self

    def do(self, step):
        kind, *arguments = step
        self.counts[kind] += 1

        if self._is_to_fail and kind in ("call", "operator", "ntops", "repeat"):
            self._is_to_fail = False
            self.driver.launch_error = RuntimeError("the launch failed")

        try:
            getattr(self, f"_{kind}")(*arguments)
        finally:
            self.driver.launch_error = None

    # Handles.

    def _twin(self, name):
        if name not in self._twins:
            self._twins[name] = self._prepared(name, self._fresh(name))

        return self._twins[name]

    def _fresh(self, name):
        return fresh_handle(name, KERNELS[name].make)

    def _subject(self, name, number):
        if (name, number) not in self._subjects:
            way, bound = [("planned", 1024), ("applied", 4)][number]
            self._remake(name, number, way, bound)

        return self._subjects[name, number][0]

    def _remake(self, name, number, way, bound):
        kernel = KERNELS[name]

        if (name, number) in self._subjects:
            self._retire(name, number, *self._subjects.pop((name, number)))

        if way == "planned" or (way == "made" and not kernel.is_generated):
            handle = ninetoothed_patches.planned(self._fresh(name), max_plans=bound)
        elif way == "made":
            handle = kernel.make(ninetoothed_patches.make, max_plans=bound)
        else:
            with applied(max_plans=bound):
                handle = kernel.make()

        assert handle.cache_info().bound == bound
        self._subjects[name, number] = (
            self._prepared(name, handle),
            collections.Counter(),
        )

    def _retire(self, name, number, handle, made):
        """Each call was counted once, and no bound was exceeded."""

        info = handle.cache_info()
        counted = info.hits + info.misses + sum(info.bypasses.values())

        if counted != made["counted"] or info.plans > info.bound:
            raise Difference(
                f"{name} {number}: {made['counted']} calls, but {counted} counted; {info}"
            )

        self.counts["hits"] += info.hits
        self.counts["misses"] += info.misses
        self.counts["evictions"] += info.evictions
        self.counts["bypasses"] += sum(info.bypasses.values())
        self.reasons.update(info.bypasses)

    def _prepared(self, name, handle):
        if name in self._pre_run_hooks and not handle._kernel.pre_run_hooks:
            self._add_pre_run_hook(handle)

        return handle

    def _handles(self, name):
        twins = [self._twins[name]] if name in self._twins else []

        return twins + [
            handle
            for (other, _), (handle, _) in self._subjects.items()
            if other == name
        ]

    # Calls.

    def _call(self, name, number, form, mode, described):
        kernel = KERNELS[name]
        names = [parameter for parameter, _ in kernel.parameters]
        values = self._values(described)
        args, keywords = _spoken(form, names, values)
        handle, twin = self._subject(name, number), self._twin(name)

        with _MODE[mode]():
            expected = self._outcome(twin, args, keywords)
            actual = self._outcome(handle, args, keywords)

        # A wrong call is counted only where none can be planned.
        if form not in _WRONG_FORMS or name == "jagged":
            self._subjects[name, number][1]["counted"] += 1

        if kernel.is_tuned:
            expected, actual = map(_without_tuning, (expected, actual))

        self._conclude(expected, actual)

    def _conclude(self, expected, actual):
        self.counts["launches"] += len(expected[0])
        self.counts["errors"] += expected[1] is not None
        _compare(expected, actual)

    def _values(self, described):
        values = []

        for description in described:
            values.append(self._value(description, values))

        return values

    def _value(self, description, earlier):
        kind, *rest = description

        if kind == "tensor":
            return make_tensor(*rest)

        if kind == "slot":
            return self._slots[rest[0]]

        if kind == "scalar":
            return SCALARS[rest[0]]

        if kind == "same":
            return earlier[rest[0]]

        if kind == "rows":
            return earlier[rest[0]][:, rest[1] : rest[2]]

        return rest[0]

    def _outcome(self, call, args, keywords):
        """What a call launched, what it raised, and which hooks saw it."""

        self.driver.clear()
        self._seen.clear()
        raised = None

        try:
            call(*args, **keywords)
        except Exception as error:
            raised = type(error), str(error)

        return self.driver.take(), raised, tuple(self._seen)

    # Our operators.

    def _operator(self, name, mode, described, is_backward):
        function = getattr(ntops_ext.torch, name)
        values = {}

        for parameter, description in described.items():
            values[parameter] = self._value(description, values)

        with _MODE[mode]():
            with self._unpatched_operators():
                expected = self._operator_outcome(function, (), values, is_backward)

            actual = self._operator_outcome(function, (), values, is_backward)

        self._conclude(expected, actual)

    def _operator_outcome(self, function, args, keywords, is_backward=False):
        results = []
        given = [*args, *keywords.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        versions = [
            None if tensor.is_inference() else tensor._version for tensor in tensors
        ]

        def call():
            result = function(*args, **keywords)
            results.extend(result if isinstance(result, tuple) else [result])

            if is_backward and results[0].requires_grad:
                leaves = [tensor for tensor in tensors if tensor.requires_grad]
                gradient = torch.ones((), dtype=results[0].dtype, device="cpu")
                results.extend(
                    torch.autograd.grad(
                        results[0], leaves, gradient.expand(results[0].shape)
                    )
                )

        records, raised, seen = self._outcome(call, (), {})
        storages = [
            (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            for tensor in [*tensors, *results]
        ]
        written = [
            version is not None and tensor._version - version
            for tensor, version in zip(tensors, versions, strict=True)
        ]

        return (
            [_relative(record, storages) for record in records],
            raised,
            seen,
            written,
            [_described(result, tensors) for result in results],
        )

    @contextlib.contextmanager
    def _unpatched_operators(self):
        """Handles as NineToothed makes them, nothing known of any layout, and no call prepared."""

        with contextlib.ExitStack() as stack:
            swap = functools.partial(_swap, stack)
            swap(_handles, "_make", self._make_unpatched)

            for module in MODULES:
                swap(module._prepared_calls, "recent", ())

            for layouts in LAYOUTS:
                swap(layouts, "_kept", {})

            yield

    @functools.cached_property
    def _make_unpatched(self):
        return functools.cache(_fresh_handle_of_operator)

    def _make_planned(self):
        return functools.cache(
            lambda *arguments: ninetoothed_patches.planned(
                _fresh_handle_of_operator(*arguments), max_plans=8
            )
        )

    def _forget_operators(self):
        _handles._make = self._make_planned()
        forget()

    # ntops'.

    def _ntops(self, name, mode, described, described_keywords):
        values = self._values(described)
        keywords = {
            name: self._value(description, [])
            for name, description in described_keywords.items()
        }
        function = getattr(import_ntops().torch, name)
        outcomes = []

        for is_planned in (False, True):
            # What an operator draws is the same both times.
            random.seed(len(values))

            with _MODE[mode](), self._making_for_ntops(is_planned):
                outcomes.append(self._operator_outcome(function, values, keywords))

        self._conclude(*map(_without_tuning, outcomes))

    @contextlib.contextmanager
    def _making_for_ntops(self, is_planned):
        """Handles with plans, or without, in the place of those that ntops keeps."""

        make = functools.partial(self._handle_of_ntops, is_planned)

        with contextlib.ExitStack() as stack:
            for module in _modules_of_ntops():
                _swap(stack, module, "_cached_make", make)

            yield

    def _handle_of_ntops(self, is_planned, premake, *args, **keywords):
        key = premake.__module__, premake.__name__, repr((args, keywords))

        if (is_planned, key) not in self._handles_of_ntops:
            # A kernel that has no configuration is tuned, here among two.
            options = {
                "num_warps": 4,
                "num_stages": 2,
                "max_num_configs": 2,
                **keywords,
            }
            make = import_ntops().torch.utils._cached_make.__wrapped__
            handle = fresh_handle(key, lambda: make(premake, *args, **options))

            if is_planned:
                handle = ninetoothed_patches.planned(handle, max_plans=4)

            self._handles_of_ntops[is_planned, key] = handle

        return self._handles_of_ntops[is_planned, key]

    # Tensors that stay.

    def _slot(self, slot, description):
        # The new one may have the identity of the former.
        self._slots.pop(slot, None)
        self._slots[slot] = make_tensor(*description[1:])

    def _data(self, slot, description):
        self._change(slot, "data", make_tensor(*description[1:]))

    def _set_(self, slot, description):
        self._change(slot, "set_", make_tensor(*description[1:]))

    def _resize_(self, slot, description):
        self._change(slot, "resize_", description[2])

    def _as_strided_(self, slot, description):
        _, _, shape, strides, offset, _ = description
        self._change(slot, "as_strided_", shape, strides, offset)

    def _transpose_(self, slot, description):
        self._change(slot, "t_")

    def _change(self, slot, name, *arguments):
        tensor = self._slots.get(slot)

        try:
            with torch.no_grad():
                if name == "data":
                    tensor.data = arguments[0]
                else:
                    getattr(tensor, name)(*arguments)
        except (AttributeError, RuntimeError, TypeError):
            # Another dtype, a leaf, memory that is too small: the tensor stays as it is.
            self.counts["changes that PyTorch refused"] += 1

    # Repeaters.

    def _repeater(self, name, number, described):
        values = self._values(described)
        repeat = ninetoothed_patches.repeater(self._subject(name, number), *values)

        if repeat is not None:
            self._repeaters.append(
                (repeat, name, self._subject(name, number), described)
            )

    def _repeat(self, index, shift):
        if not -len(self._repeaters) <= index < len(self._repeaters):
            return

        repeat, name, handle, described = self._repeaters[index]
        described = [
            [*description[:4], description[4] + shift, description[5]]
            if description[0] == "tensor"
            else description
            for description in described
        ]
        values = self._values(described)
        addresses = [
            value.data_ptr() for value in values if isinstance(value, torch.Tensor)
        ]
        expected = self._outcome(self._twin(name), values, {})
        answers = []
        actual = self._outcome(lambda: answers.append(repeat(*addresses)), (), {})

        if actual[1] is None and answers == [False]:
            self.counts["repeats refused"] += 1
            expected = [], None, ()
        else:
            self.counts["repeats"] += 1
            expected = _without_tuning(expected)

            for other, made in self._subjects.values():
                # It is a hit of the handle that it is of.
                made["counted"] += other is handle

        _compare(expected, actual)

    # Everything else.

    def _clear(self):
        ninetoothed_patches.clear_plans()

    def _collect(self):
        gc.collect()

    def _stream(self, stream):
        self.driver.stream = stream

    def _device(self, device):
        self.driver.device = device

    def _default_device(self, device):
        torch.set_default_device(None if device == "none" else device)

    def _constant(self, value):
        """What the kernel `scale_by_global` reads, and Triton compares on each call."""

        for handle in self._handles("scale_by_global"):
            handle._launch.__globals__["FACTOR"] = (
                FACTOR if value == 3 else triton.language.constexpr(value)
            )

    def _hook(self, kind):
        if kind in self._hooks:
            return

        def hook(metadata):
            self._seen.append((kind, metadata.get()["name"]))

        owner, is_chain = _hook_owner()
        name = f"launch_{kind}_hook"
        self._hooks[kind] = hook

        if is_chain:
            getattr(owner, name).add(hook)
        else:
            setattr(owner, name, hook)

    def _unhook(self, kind):
        hook = self._hooks.pop(kind, None)

        if hook is None:
            return

        owner, is_chain = _hook_owner()
        name = f"launch_{kind}_hook"

        if is_chain:
            getattr(owner, name).remove(hook)
        else:
            setattr(owner, name, None)

    def _pre_run_hook(self, name):
        """Installed if it was not, and removed if it was."""

        if name in self._pre_run_hooks:
            self._pre_run_hooks.remove(name)

            for handle in self._handles(name):
                handle._kernel.pre_run_hooks.clear()
        else:
            self._pre_run_hooks.add(name)

            for handle in self._handles(name):
                self._prepared(name, handle)

    def _add_pre_run_hook(self, handle):
        handle._kernel.add_pre_run_hook(
            lambda *args, **keywords: self._seen.append(("run", len(args)))
        )

    def _launch_error(self):
        """Of the next call."""

        self._is_to_fail = True

    def _forget_kernels(self, name, number):
        for handle in (self._twin(name), self._subject(name, number)):
            getattr(handle._kernel, triton_abi._store_attribute()).clear()

    def _forget_tuning(self, name, number):
        if KERNELS[name].is_tuned:
            for handle in (self._twin(name), self._subject(name, number)):
                tuner = handle._launch.__globals__[
                    f"{handle._kernel.__name__}_with_auto_tuning"
                ]
                tuner.cache.clear()


_MODE = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def _fresh_handle_of_operator(premake, num_warps, num_stages, keywords):
    def make():
        return ninetoothed.make(
            *premake(**dict(keywords)), num_warps=num_warps, num_stages=num_stages
        )

    key = premake.__module__, premake.__name__, num_warps, num_stages, keywords

    return fresh_handle(key, make)


def _swap(stack, owner, name, value):
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _hook_owner():
    knobs = getattr(triton, "knobs", None)

    return (
        triton.compiler.CompiledKernel if knobs is None else knobs.runtime,
        hasattr(knobs, "HookChain"),
    )


def _spoken(form, names, values):
    """One of the ways to write a call, right or wrong."""

    keywords = dict(zip(names, values, strict=True))

    if form == "keywords":
        return (), keywords

    if form == "reversed":
        return (), dict(reversed(keywords.items()))

    if form == "mixed":
        return values[:1], dict(list(keywords.items())[1:])

    if form == "missing":
        return values[:-1], {}

    if form == "surplus":
        return [*values, values[-1]], {}

    if form == "unknown":
        return values, {"unknown": 1}

    if form == "doubled":
        return values, {names[0]: values[0]}

    return values, {}


def _relative(record, storages):
    """A launch, with places in the memory of given tensors instead of addresses."""

    return (
        record.grid,
        record.stream,
        record.function,
        [(kind, _place(value, storages)) for kind, value in record.rest],
    )


def _place(value, storages):
    if type(value) is not int:
        return value

    for index, (start, size) in enumerate(storages):
        if start <= value < start + size:
            return "memory", index, value - start

    # No size or stride is as large: an address of memory that is freed by now.
    return ("temporary", value % 16) if value > 2**40 else value


def _described(result, tensors):
    """What is seen of a result, beside its elements."""

    for index, tensor in enumerate(tensors):
        if result is tensor:
            return index

    return (
        tuple(result.shape),
        result.stride(),
        result.dtype,
        result.requires_grad,
        result.is_inference(),
    )


def _without_tuning(outcome):
    """The last launch: the tuner may know the winner already, or may have forgotten it."""

    records, raised, seen, *others = outcome

    return records[-1:], raised, tuple(dict.fromkeys(seen)), *others


def _compare(expected, actual):
    if repr(expected) == repr(actual):
        return

    for one, other in zip(expected, actual, strict=True):
        if repr(one) != repr(other):
            raise Difference(
                f"the twin\n  {str(one)[:3000]}\nthe planned call\n  {str(other)[:3000]}"
            )


def has_ntops():
    """Whether ntops is installed."""

    return importlib.util.find_spec("ntops") is not None


@functools.cache
def import_ntops():
    importlib.import_module("ntops.kernels")
    importlib.import_module("ntops.torch")

    return importlib.import_module("ntops")


@functools.cache
def _modules_of_ntops():
    import_ntops()

    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("ntops.torch.")
        and name != "ntops.torch.utils"
        and hasattr(module, "_cached_make")
    ]


class FuzzDriver(RecordingDriver):
    """A recording driver by which the same configuration wins, whatever the tensors' alignment.

    Triton's tuner asks once for layouts that differ in it, and the twin may have met another one first.
    """

    def _benchmark(self, launch, quantiles):
        launch()
        time = zlib.crc32(repr(self.records[-1].grid).encode()) % 1000

        return [float(time)] * 3


@contextlib.contextmanager
def quick_compiler():
    """What Triton would compile, and what for, stands for the binary: nothing is compiled.

    Triton itself looks its kernels up, binds arguments and says what they are specialised on. A folder of its own keeps
    such binaries from those who take them for real ones.
    """

    # Up to 3.3 Triton compiles by a copy of `triton.backends.nvidia.compiler` that it loads itself.
    backend = backends["nvidia"].compiler
    original, originals_add = ASTSource.make_ir, backend.add_stages
    cache_folder = os.environ.get("TRITON_CACHE_DIR")

    def make_ir(self, *args):
        signature = list(self.signature.values())
        constants = [
            (position, type(value).__name__, str(value))
            for position, value in sorted(self.constants.items())
        ]

        return repr((self.name, signature, constants, self.attrs, self.fn.src))

    def add_stages(self, stages, options, *args, **keywords):
        def binary(text, metadata):
            metadata |= {"name": text.split("'")[1], **_METADATA}

            return f"{options} {text}".encode()

        stages |= {"ttir": lambda text, metadata: text, "cubin": binary}

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        ASTSource.make_ir, backend.add_stages = make_ir, add_stages

        try:
            yield
        finally:
            ASTSource.make_ir, backend.add_stages = original, originals_add
            del os.environ["TRITON_CACHE_DIR"]

            if cache_folder is not None:
                os.environ["TRITON_CACHE_DIR"] = cache_folder


_METADATA = {
    "shared": 0,
    "tmem_size": 0,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
}


@contextlib.contextmanager
def session(*, plain_launcher=False, target="sm_90"):
    """A `Session` under a driver of its own, with two devices."""

    driver = FuzzDriver(
        {"sm_80": SM_80, "sm_90": SM_90}[target],
        plain_launcher=plain_launcher,
        devices=(132, 64),
    )

    with active(driver), Session(driver) as opened:
        yield opened


def fails(steps, **options):
    """What is different after some of the steps, and after how many, or None."""

    done = 0

    try:
        with session(**options) as opened:
            for step in steps:
                opened.do(step)
                done += 1
    except Difference as difference:
        return str(difference), done
    except KeyError:
        # A tensor that stays was never made: steps were cut away.
        return None

    return None


def shrink(steps, is_failing, *, seconds=120):
    """Fewer of the steps that still fail."""

    end = time.monotonic() + seconds
    size = len(steps)

    while size >= 1 and time.monotonic() < end:
        start, is_smaller = 0, False

        while start < len(steps) and time.monotonic() < end:
            fewer = steps[:start] + steps[start + size :]

            if fewer and is_failing(fewer):
                steps, is_smaller = fewer, True
            else:
                start += size

        if not is_smaller:
            size //= 2

    return steps


def dumps(steps):
    """As in `launch_fuzz_corpus.json`: a step a line."""

    return "[\n" + ",\n".join(json.dumps(step) for step in steps) + "\n]"
