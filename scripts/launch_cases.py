"""The kernels that the host-time scripts call: what they compute is small, what they are called with is not.

Every case is a function that makes its handle, and the arguments of a call on a device.
"""

import contextlib
import pathlib
import sys

import ninetoothed
import torch
from ninetoothed import Tensor, block_size

TILE = (4, 128)

ROWS, COLUMNS = 32, 128


def _arrange_five(x, gate, weight, bias, out, eps, offset, rows=TILE[0]):
    x, gate, out = (tensor.tile((rows, COLUMNS)) for tensor in (x, gate, out))
    weight, bias = (
        vector.tile((COLUMNS,)).unsqueeze(0).expand((x.shape[0], -1))
        for vector in (weight, bias)
    )

    return x, gate, weight, bias, out, eps, offset


def launch_case_five_tensors(x, gate, weight, bias, out, eps, offset):
    out = x * gate + (weight + offset) * eps + bias  # noqa: F841


def _five_tensors():
    return (
        *(Tensor(2, name=name) for name in ("x", "gate")),
        *(Tensor(1, name=name) for name in ("weight", "bias")),
        Tensor(2, name="out"),
        *(Tensor(0, name=name) for name in ("eps", "offset")),
    )


def five():
    """5 tensors, 23 kernel arguments."""

    return ninetoothed.make(
        _arrange_five,
        launch_case_five_tensors,
        _five_tensors(),
        num_warps=4,
        num_stages=1,
    )


_BLOCK_ROWS = block_size(4, 16)


def five_tuned():
    """`five`, its number of rows a program auto-tuned."""

    return ninetoothed.make(
        lambda *tensors: _arrange_five(*tensors, rows=_BLOCK_ROWS),
        launch_case_five_tensors,
        _five_tensors(),
        kernel_name="launch_case_tuned",
        num_warps=4,
        num_stages=1,
    )


def arguments_of_five(device, rows=ROWS):
    x, gate, out = (torch.ones(rows, COLUMNS, device=device) for _ in range(3))
    weight, bias = (torch.ones(COLUMNS, device=device) for _ in range(2))

    return x, gate, weight, bias, out, 1e-5, 1.0


def _arrange_eleven(a, b, c, d, e, f, g, h, i, j, out, p, q, r):
    return (
        *(tensor.tile(TILE) for tensor in (a, b, c, d, e, f, g, h, i, j, out)),
        p,
        q,
        r,
    )


def launch_case_eleven_tensors(a, b, c, d, e, f, g, h, i, j, out, p, q, r):
    out = (a + b + c + d) * p + (e + f + g) * q + (h + i + j) * r  # noqa: F841


def eleven():
    """11 tensors, 58 kernel arguments."""

    names = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "out")

    return ninetoothed.make(
        _arrange_eleven,
        launch_case_eleven_tensors,
        (
            *(Tensor(2, name=name) for name in names),
            *(Tensor(0, name=name) for name in ("p", "q", "r")),
        ),
        num_warps=4,
        num_stages=1,
    )


def arguments_of_eleven(device):
    return (
        *(torch.ones(ROWS, COLUMNS, device=device) for _ in range(11)),
        0.5,
        0.25,
        2.0,
    )


CASES = {
    "5 tensors": (five, arguments_of_five),
    "5 tensors, auto-tuned": (five_tuned, arguments_of_five),
    "11 tensors": (eleven, arguments_of_eleven),
}


TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"


@contextlib.contextmanager
def launching(device):
    """For the block's duration kernels can be called on `device`. On a CPU launches do nothing."""

    if device == "cuda":
        yield

        return

    sys.path.insert(0, str(TESTS))
    import recording_driver

    # A function of C that takes whatever it is given, and is quick about it.
    recording_driver.RecordingDriver._record = staticmethod("".format)
    recording_driver.RecordingDriver._benchmark = staticmethod(
        lambda launch, quantiles: [1.0] * 3
    )

    with recording_driver.recording():
        yield


def call(handle, arguments):
    """A call with these arguments, written out: packing and unpacking them costs 0.2 us."""

    names = [f"a{index}" for index in range(len(arguments))]
    source = f"lambda: handle({', '.join(names)})"

    return eval(source, {"handle": handle, **dict(zip(names, arguments, strict=True))})


LAUNCHES_DO_NOTHING = "Launches do nothing here: these times are not those of a device."


def print_table(records, device):
    """Host times beside what they are measured against."""

    if device == "cpu":
        print(LAUNCHES_DO_NOTHING)

    print(f"{'case':40} {'us':>7} {'spread':>7} {'ratio':>6} {'bar':>5}")

    for record in records:
        bar = record["bar"]
        print(
            f"{record['case']:40} {record['median']:7.2f} {record['spread']:7.2f} "
            f"{record['ratio']:6.2f} {'' if bar is None else format(bar, '5.2f')}"
            f"{'' if bar is None or record['ratio'] <= bar else '  MISSED'}"
        )
