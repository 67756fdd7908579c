"""How PyTorch rounds the chain that `qk_norm_rope` is equal to, found out on the device.

PyTorch does not say in which order it adds the squares of a head, nor which product of a
complex multiplication it rounds; both depend on its release and on what compiled it. Here
both are observed, and then the kernel itself is compared with the chain.
"""

import contextlib
import dataclasses
import functools
import threading
import warnings

import torch

from ntops_ext import reference
from ntops_ext.configs import next_power_of_2

# A reduction of fewer rows is laid out over the lanes of a GPU in another way.
FEW_ROWS = 16

# Batch, tokens and heads: which of PyTorch's kernels multiplies heads by a table depends
# on the dimensions that are broadcast, and each was compiled by itself. No product of the
# three is divisible by 16, for which Triton would compile another kernel.
_BROADCASTS = ((2, 331, 5), (3, 411, 1), (1, 411, 1), (311, 1, 7))
_FEW_ROWS_SHAPES = ((1, 1, 8), (1, 3, 4), (2, 1, 1))

# Rows are compared on so many random elements: 50 MB of temporaries, a millisecond.
_COMPARED_ELEMENTS = 2**21

_DEFAULT_REAL_PART = "real*cosine"
_DEFAULT_IMAGINARY_PART = "real*sine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagerRounding:
    """How PyTorch rounds on one device, and whether the kernels do the same.

    `order_of_few_rows` and `order_of_rows` name the order in which the squares of a head
    are added, in a call of fewer than 16 heads and of more. `real_part` and
    `imaginary_part` name the product of the rotation that is not rounded. Where
    `is_reproduced` is false, `reason` says why, and the results are within one rounding
    of those of PyTorch, not equal to them.
    """

    order_of_few_rows: tuple
    order_of_rows: tuple
    real_part: str
    imaginary_part: str
    is_reproduced: bool
    reason: str

    def order(self, num_rows):
        return self.order_of_few_rows if num_rows < FEW_ROWS else self.order_of_rows


class RoundingCache:
    """What was found out, by device, dtype and head width, for the process's life.

    :param run_kernel: `(input, weight, rope, rounding) -> output`, the kernel with a
        rounding of the caller's choice.
    """

    def __init__(self, run_kernel):
        self._run_kernel = run_kernel
        self._found = {}
        self._lock = threading.RLock()

    def get(self, device, dtype, head_dim):
        """:raises RuntimeError: If it is not known yet and a CUDA graph is captured."""

        key = (device, dtype, head_dim)
        rounding = self._found.get(key)

        if rounding is not None:
            return rounding

        if device.type == "cpu":
            return default_rounding(
                head_dim,
                "nothing is compared on the CPU, where the chain itself computes, or Triton's"
                " interpreter, which rounds otherwise",
            )

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"How PyTorch rounds heads of {head_dim} in {dtype} on {device} is not"
                f" known yet, and finding out needs to synchronise: call the operator, or"
                f" `ntops_ext.torch.eager_rounding`, once before the capture."
            )

        with self._lock:
            if key not in self._found:
                self._found[key] = self._find(device, dtype, head_dim)

        return self._found[key]

    def _find(self, device, dtype, head_dim):
        with _no_modes(device):
            rounding = observe(device, head_dim)

            if rounding.is_reproduced:
                rounding = self._verify(rounding, device, dtype, head_dim)

        if not rounding.is_reproduced and _is_promised(dtype, head_dim):
            warnings.warn(
                f"qk_norm_rope in {dtype} with heads of {head_dim} on {device} does not"
                f" give the bits of this build of PyTorch: {rounding.reason}. Its results"
                f" are within one rounding of them.",
                RuntimeWarning,
                stacklevel=2,
            )

        return rounding

    def _verify(self, rounding, device, dtype, head_dim):
        for name, (heads, weight, rope) in _cases(device, dtype, head_dim):
            expected = reference.qk_norm_rope(heads, weight, rope)
            actual = self._run_kernel(*_one_head_a_token(heads, weight, rope), rounding)
            actual = actual.view(heads.shape)

            if not torch.equal(_bits(expected), _bits(actual)):
                return dataclasses.replace(
                    rounding,
                    is_reproduced=False,
                    reason=f"the kernel differs from PyTorch on {name}",
                )

        return rounding


@contextlib.contextmanager
def _no_modes(device):
    # What the caller has switched on must not reach in.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def default_rounding(head_dim, reason):
    """What a kernel does where it is not to equal anything."""

    order = candidate_orders(head_dim)[0]

    return EagerRounding(
        order_of_few_rows=order,
        order_of_rows=order,
        real_part=_DEFAULT_REAL_PART,
        imaginary_part=_DEFAULT_IMAGINARY_PART,
        is_reproduced=False,
        reason=reason,
    )


def candidate_orders(head_dim):
    """The orders in which some build of PyTorch adds a head of this width, likely first."""

    width = next_power_of_2(head_dim)

    if width < 128:
        groupings = ("nothing",)
    elif width == 128:
        groupings = ("vectors", "lanes", "nothing")
    elif width == 256:
        groupings = ("folded_vectors", "vectors", "nothing")
    else:
        groupings = ("vectors", "nothing")

    return [
        (grouping, distances)
        for distances in ("decreasing", "increasing")
        for grouping in groupings
    ]


def _mean(rows):
    return rows.mean(-1)


def observe(device, head_dim, mean=_mean, multiply=torch.mul):
    """What PyTorch's mean and complex multiplication do, without any kernel of ours."""

    observe_rows = functools.partial(observe_order, device, head_dim, mean=mean)
    orders = {
        "fewer than 16 heads": observe_rows(num_rows=8, num_calls=16),
        "16 heads and more": observe_rows(num_rows=128, num_calls=1),
    }
    parts = observe_products(device, head_dim, multiply)
    unknown = [
        f"the order of the mean of {rows}" for rows in orders if not orders[rows]
    ]
    unknown += [f"the rounding of the {part} part" for part in parts if not parts[part]]
    default = default_rounding(head_dim, "")

    return EagerRounding(
        order_of_few_rows=orders["fewer than 16 heads"] or default.order_of_few_rows,
        order_of_rows=orders["16 heads and more"] or default.order_of_rows,
        real_part=parts["real"] or default.real_part,
        imaginary_part=parts["imaginary"] or default.imaginary_part,
        is_reproduced=not unknown,
        reason=f"unknown to the kernel: {', '.join(unknown)}" if unknown else "",
    )


def observe_order(device, head_dim, *, num_rows, num_calls, mean=_mean):
    """The order in which `mean` adds rows of this width, or `None` if unknown.

    128 rows in all: two orders agree on all of them with a probability of 1e-10.
    """

    terms = torch.rand((num_calls, num_rows, head_dim), **_random_float32(device))
    means = torch.stack([mean(rows) for rows in terms])

    for order in candidate_orders(head_dim):
        expected = reference.sum_in_order(terms, order) * (1 / head_dim)

        if torch.equal(_bits(means), _bits(expected)):
            return order

    return None


def observe_products(device, head_dim, multiply=torch.mul):
    """Which product of each part of a complex number `multiply` does not round.

    :return: `"real"` and `"imaginary"` -> the product's name, or `None` if both are rounded
        or different kernels of PyTorch disagree.
    """

    above, below = 1 + 2**-23, 1 - 2**-24
    # In each probe the rounded products cancel, and what is left is what one product, if
    # it was not rounded, had more than float32 holds.
    probes = {
        "real*cosine": (complex(above, 1), complex(below, 1), "real"),
        "imaginary*sine": (complex(1, above), complex(1, below), "real"),
        "real*sine": (complex(above, -1), complex(1, below), "imag"),
        "imaginary*cosine": (complex(1, -above), complex(below, 1), "imag"),
    }
    extremes = torch.stack(
        [
            torch.stack(
                getattr(
                    multiply(*_factors(left, right, shape, head_dim, device)), part
                ).aminmax()
            )
            for left, right, part in probes.values()
            for shape in _BROADCASTS
        ]
    )
    is_seen = {}

    for name, rows in zip(
        probes, extremes.view(len(probes), len(_BROADCASTS), 2).tolist(), strict=True
    ):
        values = {value for extreme in rows for value in extreme}
        is_seen[name] = None if len(values) > 1 else values != {0.0}

    return {
        "real": _only(is_seen, "real*cosine", "imaginary*sine"),
        "imaginary": _only(is_seen, "real*sine", "imaginary*cosine"),
    }


def _factors(left, right, shape, head_dim, device):
    pairs = torch.full(
        (*shape, head_dim // 2), left, dtype=torch.complex64, device=device
    )
    table = torch.full(
        (shape[1], head_dim // 2), right, dtype=torch.complex64, device=device
    )

    return pairs, table[:, None, :]


def _only(is_seen, first, second):
    if is_seen[first] is True and is_seen[second] is False:
        return first

    if is_seen[second] is True and is_seen[first] is False:
        return second

    return None


def _cases(device, dtype, head_dim):
    options = _random_float32(device)
    weight = torch.randn(head_dim, **options).to(dtype)

    def make_heads(*shape):
        return torch.randn(*shape, head_dim, **options).to(dtype)

    def make_table(tokens):
        angles = torch.rand(tokens, head_dim // 2, **options)

        return torch.polar(torch.ones_like(angles), 6.28 * angles)

    tokens = _COMPARED_ELEMENTS // (31 * head_dim) | 1
    yield "random heads", (make_heads(1, tokens, 31), weight, make_table(tokens))

    for shape in (*_BROADCASTS, *_FEW_ROWS_SHAPES):
        yield (
            f"random heads of shape {(*shape, head_dim)}",
            (make_heads(*shape), weight, make_table(shape[1])),
        )

    # Tables that turn each pair onto one axis: the other part is what rounding leaves, and
    # the forms of the product differ in nearly every element.
    tokens = 135
    one_head = make_heads(1, tokens, 1)
    identity = torch.ones(tokens, head_dim // 2, dtype=torch.complex64, device=device)
    weighted = reference.qk_norm_rope(one_head, weight, identity).float()
    pairs = torch.view_as_complex(weighted[0, :, 0].unflatten(-1, (-1, 2)).contiguous())
    directions = pairs / pairs.abs().clamp_min(1e-30)
    heads = one_head.expand(-1, -1, 5, -1).contiguous()

    for part, table in (
        ("real", torch.complex(directions.imag, directions.real)),
        ("imaginary", directions.conj().resolve_conj()),
    ):
        yield f"heads whose {part} part cancels", (heads, weight, table)


def _one_head_a_token(heads, weight, rope):
    # A kernel is made for a number of heads: of these shapes all would need one each, and
    # a second or two to make it. No head's bits depend on how they are arranged.
    batch, tokens, num_heads, head_dim = heads.shape
    rows = rope[:, None].expand(batch, tokens, num_heads, head_dim // 2)

    return (
        heads.reshape(1, -1, 1, head_dim),
        weight,
        rows.reshape(-1, head_dim // 2),
    )


def _generator(device):
    return torch.Generator(device).manual_seed(20261130)


def _random_float32(device):
    # The default dtype is the caller's, and may be anything.
    return {
        "generator": _generator(device),
        "device": device,
        "dtype": torch.float32,
    }


def _bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _is_promised(dtype, head_dim):
    return dtype in (torch.float16, torch.bfloat16) and head_dim in (64, 128)
