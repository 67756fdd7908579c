"""Kernels that are launched early wait for what is in front of them, on a GPU.

In front of an operator a single program copies a megabyte, row after row, and lets the next kernel start meanwhile. At the
end of what it writes, or reads, lies a tensor of the operator.
"""

import launch_kernels
import pytest
import torch
import triton
from comparison import assert_all_equal_bits
from rope_inputs import make_rope

import ninetoothed_patches
import ntops_ext
from ninetoothed_patches import dependent_launch, triton_abi
from ntops_ext.torch import _gated_rms_norm_backward, _qk_norm_rope_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
        or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5),
        reason="needs a GPU of compute capability 9.0, and Triton 3.5",
    ),
]

DEVICE = "cuda"

_ROWS = 4096


class LateTensor:
    """A tensor at the end of a megabyte.

    :param values: What it is to hold in the end. Its bytes are whole rows of 512.
    """

    def __init__(self, values):
        self.values = values
        num_bytes = values.numel() * values.element_size()
        assert num_bytes % 512 == 0

        self._rows = torch.zeros(_ROWS, 128, dtype=torch.int32, device=DEVICE)
        self._source = torch.zeros_like(self._rows)
        self.tensor = self._end_of(self._rows, num_bytes)
        self._end_of(self._source, num_bytes).copy_(values)
        self._source_on_host = self._source.cpu().pin_memory()

    def _end_of(self, rows, num_bytes):
        end = rows.view(torch.uint8).flatten()[-num_bytes:]

        return end.view(self.values.dtype).view(self.values.shape)

    def forget(self):
        self._rows.zero_()

    def write(self, slow_copy):
        """Begin to write the values."""

        slow_copy(self._source, self._rows)

    def write_from_host(self):
        """Begin to write the values by a copy, which is no kernel."""

        self._rows.copy_(self._source_on_host, non_blocking=True)

    def read(self, slow_copy):
        """Begin to read what it holds; return where that will be."""

        target = torch.zeros_like(self._rows)
        slow_copy(self._rows, target)

        return self._end_of(target, self.tensor.numel() * self.tensor.element_size())


@pytest.fixture(scope="module")
def slow_copy():
    return launch_kernels.slow_copy()


def randn(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))

    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def norm_arguments(rows, columns):
    return (
        randn(rows, columns),
        randn(columns),
        randn(rows, columns, seed=1),
    )


def norm(input, weight, gate):
    return (ntops_ext.torch.gated_rms_norm(input, weight, gate),)


def norm_first(input, weight, gate):
    return (ntops_ext.torch.gated_rms_norm(input, weight, gate, norm_before_gate=True),)


def norm_gradients(grad_output, input, weight, gate):
    gradients = _gated_rms_norm_backward.backward(
        *(grad_output, input, weight, gate, None),
        *(1e-5, None, True, "silu", 0.0),
        (True, True, True, False),
    )

    return gradients[:3]


def rope(heads, weight, table):
    return (ntops_ext.torch.qk_norm_rope(heads, weight, torch.view_as_complex(table)),)


def rope_gradients(grad_output, heads, weight, table):
    return _qk_norm_rope_backward.backward(
        grad_output,
        heads,
        weight,
        torch.view_as_complex(table),
        1e-6,
        (True, True),
    )


def rope_arguments():
    generator = torch.Generator(DEVICE).manual_seed(0)
    table = torch.view_as_real(make_rope(64, 256, DEVICE, generator))

    return randn(1, 64, 4, 256), randn(256), table


def pack(q, k_src, v_src, q_weight, k_weight, table, k_prefix, v_prefix):
    k_out, v_out = (
        torch.empty(1, 67, 4, 256, dtype=q.dtype, device=DEVICE) for _ in range(2)
    )
    ntops_ext.torch.qk_norm_rope_pack_(
        *(q, k_out, v_out, q_weight, k_weight, torch.view_as_complex(table)),
        *(k_prefix, v_prefix, k_src, v_src),
    )

    return q, k_out, v_out


def pack_arguments():
    q, weight, table = rope_arguments()
    k_src, v_src = (randn(1, 64, 4, 256, seed=seed) for seed in (1, 2))
    k_prefix, v_prefix = (randn(1, 3, 4, 256, seed=seed) for seed in (1, 2))

    return q, k_src, v_src, weight, weight + 1, table, k_prefix, v_prefix


# The operator, how many arguments it has, and these.
CASES = {
    "norm": (norm, 3, lambda: norm_arguments(64, 256)),
    "norm of pieces": (norm, 3, lambda: norm_arguments(64, 1280)),
    "norm of a shared row": (norm_first, 3, lambda: norm_arguments(1, 4096)),
    "norm by pieces": (norm, 3, lambda: norm_arguments(2, 2**16)),
    "gradients of norm": (
        norm_gradients,
        4,
        lambda: (randn(64, 256, seed=2), *norm_arguments(64, 256)),
    ),
    "gradients of norm, by parts": (
        norm_gradients,
        4,
        lambda: (randn(3, 20480, seed=2), *norm_arguments(3, 20480)),
    ),
    "rope": (rope, 3, rope_arguments),
    "gradients of rope": (
        rope_gradients,
        4,
        lambda: (randn(1, 64, 4, 256, seed=2), *rope_arguments()),
    ),
    "pack": (pack, 8, pack_arguments),
}

EACH = [
    pytest.param(name, index, id=f"{name}-{index}")
    for name in CASES
    for index in range(CASES[name][1])
]


def prepare(name, index):
    """A call whose argument at `index` comes late, what undoes it, that argument, and the call's results; it has plans.

    The call launches the operator's kernels and no others: the first comes right behind what was launched before.
    """

    function, count, make_arguments = CASES[name]
    arguments = list(make_arguments())
    assert len(arguments) == count
    late = LateTensor(arguments[index])
    values = [argument.clone() for argument in arguments]
    arguments[index] = late.tensor

    # What a plan needs, and whatever an operator remembers of addresses.
    for _ in range(4):
        for argument, original in zip(arguments, values, strict=True):
            argument.copy_(original)

        expected = [tensor.clone() for tensor in function(*arguments)]

    def undo():
        for argument, original in zip(arguments, values, strict=True):
            argument.copy_(original)

        late.forget()
        torch.cuda.synchronize()

    undo()

    return lambda: function(*arguments), undo, late, expected


def test_it_is_known_here():
    """The driver can be asked for its version."""

    assert dependent_launch.driver_version() >= 12030
    assert ninetoothed_patches.has_dependent_launch(torch.device(DEVICE, 0))


def test_the_slow_copy_is_overtaken(slow_copy, monkeypatch):
    """By a kernel that is launched early and does not wait: else the tests below could not fail."""

    monkeypatch.setattr(triton_abi, "waits_for_previous_kernel", lambda compiled: True)
    handle = ninetoothed_patches.planned(launch_kernels.scale())
    late = LateTensor(randn(64, 128))
    output = torch.zeros_like(late.tensor)

    for _ in range(3):
        handle(late.tensor, 1.0, output)

    late.forget()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    late.write(slow_copy)
    handle(late.tensor, 1.0, output)
    torch.cuda.synchronize()

    assert torch.equal(late.tensor, late.values)
    assert torch.count_nonzero(output) == 0


@pytest.mark.parametrize("name, index", EACH)
def test_what_is_written_late_is_read_when_it_is_there(slow_copy, name, index):
    """In one stream: every argument of every operator in turn."""

    call, undo, late, expected = prepare(name, index)

    for _ in range(3):
        undo()
        # While the GPU sleeps both are queued.
        torch.cuda._sleep(2_000_000)
        late.write(slow_copy)
        actual = call()
        torch.cuda.synchronize()
        assert_all_equal_bits(actual, expected)


@pytest.mark.parametrize("name, index", EACH)
def test_it_is_in_a_graph(slow_copy, name, index):
    """The launch keeps its kind when it is captured."""

    call, undo, late, expected = prepare(name, index)
    late.write(slow_copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        late.write(slow_copy)
        actual = call()

    for _ in range(3):
        undo()
        graph.replay()
        torch.cuda.synchronize()
        assert_all_equal_bits(actual, expected)


@pytest.mark.parametrize("is_captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_another_stream_is_waited_for(slow_copy, name, is_captured):
    """By an event, right in front of the operator; a kernel of its own stream has ended long before."""

    call, undo, late, expected = prepare(name, 0)
    late.write(slow_copy)
    other = torch.cuda.Stream()
    short = torch.zeros(128, device=DEVICE)
    torch.cuda.synchronize()

    def run():
        current = torch.cuda.current_stream()
        other.wait_stream(current)

        with torch.cuda.stream(other):
            late.write(slow_copy)

        short.add_(1)
        current.wait_stream(other)

        return call()

    if is_captured:
        graph = torch.cuda.CUDAGraph()

        with torch.cuda.graph(graph):
            actual = run()

    for _ in range(3):
        undo()

        if is_captured:
            graph.replay()
        else:
            actual = run()

        torch.cuda.synchronize()
        assert_all_equal_bits(actual, expected)


@pytest.mark.parametrize("is_captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_from_the_host_is_waited_for(name, is_captured):
    """In front of the operator there need be no kernel."""

    call, undo, late, expected = prepare(name, 0)

    if is_captured:
        graph = torch.cuda.CUDAGraph()

        with torch.cuda.graph(graph):
            late.write_from_host()
            actual = call()

    for _ in range(3):
        undo()

        if is_captured:
            graph.replay()
        else:
            torch.cuda._sleep(2_000_000)
            late.write_from_host()
            actual = call()

        torch.cuda.synchronize()
        assert_all_equal_bits(actual, expected)


@pytest.mark.parametrize("is_captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_what_is_read_late_is_not_overwritten(slow_copy, norm_before_gate, is_captured):
    """In place, while the kernel in front still reads."""

    input, weight, gate = norm_arguments(64, 256)
    late = LateTensor(input)

    def call():
        return ntops_ext.torch.gated_rms_norm(
            late.tensor,
            weight,
            gate,
            norm_before_gate=norm_before_gate,
            out=late.tensor,
        )

    for _ in range(4):
        late.tensor.copy_(input)
        expected = call().clone()
        late.read(slow_copy)

    if is_captured:
        graph = torch.cuda.CUDAGraph()

        with torch.cuda.graph(graph):
            seen = late.read(slow_copy)
            call()

    for _ in range(3):
        late.tensor.copy_(input)
        torch.cuda.synchronize()

        if is_captured:
            graph.replay()
        else:
            torch.cuda._sleep(2_000_000)
            seen = late.read(slow_copy)
            call()

        torch.cuda.synchronize()
        assert_all_equal_bits((seen, late.tensor), (input, expected))


def test_the_kernel_behind_finds_what_the_one_before_the_last_wrote(slow_copy):
    """A kernel that is launched early ends after the one that it waits for; so the next may rely on both."""

    call, undo, late, expected = prepare("norm", 0)
    other = norm_arguments(32, 128)

    for _ in range(4):
        norm(*other)

    for _ in range(3):
        undo()
        torch.cuda._sleep(2_000_000)
        late.write(slow_copy)
        norm(*other)
        actual = call()
        copied = late.tensor.clone()
        torch.cuda.synchronize()
        assert_all_equal_bits((*actual, copied), (*expected, late.values))
