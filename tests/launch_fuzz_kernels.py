"""The kernels that random calls are made of: those of `launch_kernels`, and kernels that are written here, text and all.

What a kernel's number is decides what it is, so that a recorded call means the same ever after.
"""

import dataclasses
import functools
import importlib.util
import linecache
import pathlib
import random
import tempfile

import launch_kernels
import ninetoothed
from ninetoothed import Tensor, block_size

_HEADER = '''\
"""Applications that were generated."""

import ninetoothed.language as ntl
'''

NUM_ELEMENTWISE, NUM_REDUCTIONS, NUM_PRODUCTS = 12, 5, 3


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and what its calls look like.

    :param make: Makes it; called anew for each handle.
    :param parameters: For each parameter its name and its number of dimensions; 0 for a scalar.
    :param last_size: The size of the last dimension, if it is not free.
    :param is_constexpr: Whether scalars are compiled for.
    :param is_tuned: Whether each new layout compiles several kernels.
    :param shapes: How the tensors' shapes belong together: they are "alike", the output is "reduced", or a "product".
    :param is_generated: Whether `make` takes the function that makes handles, and its options.
    """

    make: object
    parameters: tuple
    last_size: int | None = None
    is_constexpr: bool = False
    is_tuned: bool = False
    shapes: str = "alike"
    is_generated: bool = False


def _known(name, *parameters, **options):
    return Kernel(getattr(launch_kernels, name), parameters, **options)


_SCALE = (("x", 2), ("s", 0), ("o", 2))

KERNELS = {
    "scale": _known("scale", *_SCALE, last_size=128),
    "scale_strided": _known("scale_strided", *_SCALE),
    "scale_c": _known("scale_c", *_SCALE, last_size=128, is_constexpr=True),
    "scale_t": _known("scale_t", ("x", 1), ("s", 0), ("o", 1), is_tuned=True),
    "scale_tuned_warps": _known(
        "scale_tuned_warps", ("x", 1), ("s", 0), ("o", 1), is_tuned=True
    ),
    "axpy": _known("axpy", ("x", 2), ("y", 2), ("o", 2), ("a", 0), last_size=128),
    "spare": _known("spare", ("x", 2), ("s", 0), ("b", 0), ("o", 2), last_size=128),
    "names_of_ours": _known(
        "names_of_ours",
        *(("key", 2), ("plan", 0), ("type", 2), ("cache", 2)),
        *(("next", 0), ("jit", 2), ("len", 0)),
        last_size=128,
    ),
    "jagged": _known("jagged", ("x", 3), ("s", 0), ("o", 3), last_size=128),
    "scale_by_global": _known("scale_by_global", *_SCALE, last_size=128),
}


def _expression(generator, tensors, scalars):
    """Every operand once, and functions around some of them."""

    operands = [*tensors, *scalars]
    generator.shuffle(operands)
    text = f"ntl.cast({operands[0]}, ntl.float32)"

    for operand in operands[1:]:
        form = generator.choice(
            ["({0} + {1})", "({0} * {1})", "({1} - {0})", "ntl.exp({0} * {1})"]
            + ["ntl.where({0} > 0, {0}, {0} + {1})", "ntl.abs({0}) * {1}"]
        )
        text = form.format(text, operand)

    return text


def _elementwise(index):
    """Text of an application, its premake, and what its calls look like."""

    generator = random.Random(f"element-wise {index}")
    ndim = 1 + index % 3
    tensors = [f"x{position}" for position in range(1 + index % 4 % 3)]
    scalars = [f"s{position}" for position in range(index // 3 % 3)]
    parameters = [*tensors, *scalars, "o"]
    generator.shuffle(parameters)

    while parameters[0] in scalars:
        # NineToothed takes the grid from the first.
        parameters.append(parameters.pop(0))

    is_tuned = index % 4 == 3
    is_constexpr = index % 5 == 4 and bool(scalars)
    name = f"launch_fuzz_elementwise_{index}"
    text = f"""
def {name}({", ".join(parameters)}):
    o = {_expression(generator, tensors, scalars)}
"""
    tile = ((128,), (2, 64), (1, 2, 64))[ndim - 1]

    if is_tuned:
        tile = (*tile[:-1], block_size(64, 128))

    def arrangement(*given):
        return tuple(tensor.tile(tile) if tensor.ndim else tensor for tensor in given)

    def tensor(parameter):
        if parameter in scalars:
            return Tensor(0, name=parameter, constexpr=is_constexpr)

        if index % 6 == 5:
            # Sizes that are compiled for.
            return Tensor(ndim, name=parameter, shape_options={"constexpr": True})

        return Tensor(ndim, name=parameter)

    return (
        name,
        text,
        arrangement,
        lambda: tuple(map(tensor, parameters)),
        {
            "parameters": tuple(
                (parameter, 0 if parameter in scalars else ndim)
                for parameter in parameters
            ),
            "is_tuned": is_tuned,
            "is_constexpr": is_constexpr,
        },
    )


def _reduction(index):
    generator = random.Random(f"reduction {index}")
    function = ("sum", "max", "min", "sum", "max")[index]
    has_scale = index % 2 == 1
    parameters = ["x", *(["s"] if has_scale else []), "o"]

    if index > 2:
        parameters.reverse()

    name = f"launch_fuzz_reduction_{index}"
    factor = " * s" if has_scale else ""
    text = f"""
def {name}({", ".join(parameters)}):
    o = ntl.{function}(ntl.cast(x, ntl.float32){factor}, axis=1)
"""
    rows = generator.choice([1, 2, 4])
    columns = (64, 128)[index % 2]

    def arrangement(*given):
        arranged = {
            "x": lambda tensor: tensor.tile((rows, columns)),
            "s": lambda tensor: tensor,
            "o": lambda tensor: tensor.tile((rows,)),
        }

        return tuple(
            arranged[parameter](tensor)
            for parameter, tensor in zip(parameters, given, strict=True)
        )

    def tensor(parameter):
        if parameter == "x":
            return Tensor(shape=(None, columns), name="x")

        return Tensor({"s": 0, "o": 1}[parameter], name=parameter)

    dims = {"x": 2, "s": 0, "o": 1}

    return (
        name,
        text,
        arrangement,
        lambda: tuple(map(tensor, parameters)),
        {
            "parameters": tuple(
                (parameter, dims[parameter]) for parameter in parameters
            ),
            "last_size": columns,
            "shapes": "reduced",
        },
    )


def _product(index):
    name = f"launch_fuzz_product_{index}"
    has_scale = index == 1
    is_tuned = index == 2
    parameters = ["x", "y", *(["s"] if has_scale else []), "o"]
    text = f"""
def {name}({", ".join(parameters)}):
    accumulator = ntl.zeros(o.shape, dtype=ntl.float32)

    for k in range(x.shape[0]):
        accumulator += ntl.dot(x[k], y[k])

    o = accumulator{" * s" if has_scale else ""}
"""
    size = block_size(16, 32) if is_tuned else 16

    def arrangement(*given):
        x, y, *scale, o = given
        o = o.tile((size, 16))
        x = x.tile((size, 16)).tile((1, -1)).expand((-1, o.shape[1]))
        x.dtype = x.dtype.squeeze(0)
        y = y.tile((16, 16)).tile((-1, 1)).expand((o.shape[0], -1))
        y.dtype = y.dtype.squeeze(1)

        return x, y, *scale, o

    return (
        name,
        text,
        arrangement,
        lambda: tuple(
            Tensor(0 if parameter == "s" else 2, name=parameter)
            for parameter in parameters
        ),
        {
            "parameters": tuple(
                (parameter, 0 if parameter == "s" else 2) for parameter in parameters
            ),
            "shapes": "product",
            "is_tuned": is_tuned,
        },
    )


_PARTS = [
    *map(_elementwise, range(NUM_ELEMENTWISE)),
    *map(_reduction, range(NUM_REDUCTIONS)),
    *map(_product, range(NUM_PRODUCTS)),
]


@functools.cache
def _applications():
    """The module of the applications' text: NineToothed reads it."""

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "launch_fuzz_applications.py")
        path.write_text(_HEADER + "\n".join(text for _, text, *_ in _PARTS))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # NineToothed reads the text when a kernel is made: without a time of change it is never read again.
        text = path.read_text()
        linecache.cache[str(path)] = len(text), None, text.splitlines(True), str(path)

    return module


def _generated(name, arrangement, tensors, options):
    def make(make=ninetoothed.make, **keywords):
        return make(
            arrangement,
            getattr(_applications(), name),
            tensors(),
            num_warps=4,
            num_stages=2,
            **keywords,
        )

    return Kernel(make, is_generated=True, **options)


for _name, _, _arrangement, _tensors, _options in _PARTS:
    KERNELS[_name.removeprefix("launch_fuzz_")] = _generated(
        _name, _arrangement, _tensors, _options
    )
