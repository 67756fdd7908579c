"""The kernels of the launch tests: small, each with one thing that a launch plan has to get right."""

import ninetoothed
import ninetoothed.language as ntl
import triton
import triton.language
from ninetoothed import Tensor, block_size

_TILE = (4, 128)


def _rows(x, s, o):
    return x.tile(_TILE), s, o.tile(_TILE)


def launch_scale_application(x, s, o):
    o = x * s  # noqa: F841


def _rows_spare(x, s, b, o):
    return x.tile(_TILE), s, b, o.tile(_TILE)


def launch_spare_application(x, s, b, o):
    o = x * s  # noqa: F841


def _rows_axpy(a, x, y, o):
    return x.tile(_TILE), y.tile(_TILE), o.tile(_TILE), a


def launch_axpy_application(x, y, o, a):
    o = a * x + y  # noqa: F841


BLOCK = block_size(32, 256)


def _blocks(x, s, o):
    return x.tile((BLOCK,)), s, o.tile((BLOCK,))


def scale():
    """x, o [R, 128], a scalar s: o = x * s."""

    return ninetoothed.make(
        _rows,
        launch_scale_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(0, name="s"),
            Tensor(shape=(None, 128), name="o"),
        ),
        num_warps=4,
        num_stages=2,
    )


def scale_strided():
    """`scale` with both sizes symbolic on the outside: more arguments that Triton folds."""

    return ninetoothed.make(
        _rows,
        launch_scale_application,
        (Tensor(2, name="x"), Tensor(0, name="s"), Tensor(2, name="o")),
        kernel_name="launch_scale_strided",
        num_warps=4,
        num_stages=2,
    )


def scale_c():
    """`scale`, s a compile-time scalar."""

    return ninetoothed.make(
        _rows,
        launch_scale_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(0, name="s", constexpr=True),
            Tensor(shape=(None, 128), name="o"),
        ),
        kernel_name="launch_scale_constexpr",
        num_warps=4,
        num_stages=2,
    )


def scale_t():
    """`scale` in one dimension, auto-tuned."""

    return ninetoothed.make(
        _blocks,
        launch_scale_application,
        (Tensor(1, name="x"), Tensor(0, name="s"), Tensor(1, name="o")),
        kernel_name="launch_scale_tuned",
        num_warps=4,
        num_stages=2,
    )


def scale_tuned_warps():
    """`scale_t`, with the number of warps tuned as well."""

    return ninetoothed.make(
        _blocks,
        launch_scale_application,
        (Tensor(1, name="x"), Tensor(0, name="s"), Tensor(1, name="o")),
        kernel_name="launch_scale_tuned_warps",
        num_warps=(1, 2, 4, 8),
        num_stages=2,
        max_num_configs=8,
    )


def axpy():
    """x, y, o [R, 128], a scalar a: o = a * x + y. The scalar comes last."""

    return ninetoothed.make(
        lambda x, y, o, a: _rows_axpy(a, x, y, o),
        launch_axpy_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(shape=(None, 128), name="y"),
            Tensor(shape=(None, 128), name="o"),
            Tensor(0, name="a"),
        ),
        num_warps=4,
        num_stages=2,
    )


def spare():
    """`scale` with a second scalar b that the kernel never uses: b may be None."""

    return ninetoothed.make(
        _rows_spare,
        launch_spare_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(0, name="s"),
            Tensor(0, name="b"),
            Tensor(shape=(None, 128), name="o"),
        ),
        num_warps=4,
        num_stages=2,
    )


def launch_names_application(key, plan, type, cache, next, jit, len):
    cache = key * plan + type * next + jit * len  # noqa: F841


def names_of_ours():
    """A kernel whose parameters are called what other code calls its own."""

    return ninetoothed.make(
        lambda key, plan, type, cache, next, jit, len: (
            *(tensor.tile(_TILE) for tensor in (key,)),
            plan,
            *(tensor.tile(_TILE) for tensor in (type, cache)),
            next,
            jit.tile(_TILE),
            len,
        ),
        launch_names_application,
        (
            Tensor(shape=(None, 128), name="key"),
            Tensor(0, name="plan"),
            Tensor(shape=(None, 128), name="type"),
            Tensor(shape=(None, 128), name="cache"),
            Tensor(0, name="next"),
            Tensor(shape=(None, 128), name="jit"),
            Tensor(0, name="len"),
        ),
        num_warps=4,
        num_stages=2,
    )


def jagged():
    """A jagged x, o of [B, J, 128]."""

    def arrangement(x, s, o):
        return x.tile((1, 4, 128)), s, o.tile((1, 4, 128))

    return ninetoothed.make(
        arrangement,
        launch_scale_application,
        (
            Tensor(3, jagged_dim=1, name="x"),
            Tensor(0, name="s"),
            Tensor(3, jagged_dim=1, name="o"),
        ),
        kernel_name="launch_scale_jagged",
        num_warps=4,
        num_stages=2,
    )


FACTOR = triton.language.constexpr(3)


@triton.jit
def launch_times_factor(x):
    return x * FACTOR


def launch_global_application(x, s, o):
    o = launch_times_factor(x) * s  # noqa: F841


def scale_by_global():
    """`scale` times a constant of the generated module, which Triton compares with its value on each call."""

    handle = ninetoothed.make(
        _rows,
        launch_global_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(0, name="s"),
            Tensor(shape=(None, 128), name="o"),
        ),
        num_warps=4,
        num_stages=2,
    )
    handle._launch.__globals__["FACTOR"] = FACTOR

    return handle


def launch_waiting_application(x, s, o):
    ntl.extra.cuda.gdc_wait()
    o = x * s  # noqa: F841


def waiting():
    """`scale`, whose programs wait for the kernel in front of them."""

    return ninetoothed.make(
        _rows,
        launch_waiting_application,
        (
            Tensor(shape=(None, 128), name="x"),
            Tensor(0, name="s"),
            Tensor(shape=(None, 128), name="o"),
        ),
        num_warps=4,
        num_stages=2,
    )


def _by_one_program(*tensors):
    def arrange(tensor):
        rows = tensor.tile((1, 128)).tile((-1, 1)).squeeze(1)
        rows.dtype = rows.dtype.squeeze(1)
        rows.dtype.dtype = rows.dtype.dtype.squeeze(0)

        return rows

    return tuple(map(arrange, tensors))


def launch_slow_copy_application(x, o):
    ntl.extra.cuda.gdc_launch_dependents()

    for step in range(x.shape[0]):
        row = x[step]
        o[step] = row


def slow_copy():
    """x, o [R, 128]: o = x, row after row, while a kernel that waits itself may be launched already."""

    return ninetoothed.make(
        _by_one_program,
        launch_slow_copy_application,
        tuple(Tensor(shape=(None, 128), name=name) for name in ("x", "o")),
        num_warps=1,
        num_stages=1,
    )
