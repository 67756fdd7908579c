"""Launch plans on a real GPU: the same bits as the unpatched twin, whatever happens in between."""

import json
import os
import subprocess
import sys
import textwrap

import launch_kernels
import pytest
import torch
from threads import in_threads

import ninetoothed_patches

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Results:
    """A planned handle and its twin, compared by what they compute."""

    def __init__(self, name="scale", **options):
        self.twin = getattr(launch_kernels, name)()
        self.planned = ninetoothed_patches.planned(
            getattr(launch_kernels, name)(), **options
        )

    def check(self, x, s, o):
        expected = torch.full_like(o, 7)
        o.fill_(7)
        self.twin(x, s, expected)
        self.planned(x, s, o)
        assert torch.equal(bits(expected), bits(o))

    @property
    def counts(self):
        info = self.planned.cache_info()

        return info.hits, info.misses, sum(info.bypasses.values())


def bits(tensor):
    """Integers, so that -0.0 and NaN count."""

    sizes = {2: torch.int16, 4: torch.int32}

    return tensor.contiguous().view(sizes[tensor.element_size()])


def rows(count=8, *, dtype=torch.bfloat16, offset=0, stride=128):
    buffer = torch.randn(count * stride + offset, device=DEVICE).to(dtype)

    return buffer[offset:].as_strided((count, 128), (stride, 1), offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_the_twins_bit_for_bit(dtype):
    """LP01, LP02, LP06, LP09, LP11, LP22, LP47, LP48: layouts, alignments, scalars, in turn."""

    pair = Results()
    o = torch.empty(5, 128, dtype=dtype, device=DEVICE)
    misaligned = rows(5, dtype=dtype, offset=1)

    for _ in range(3):
        for x in (
            rows(5, dtype=dtype),
            rows(5, dtype=dtype, offset=1),
            rows(5, dtype=dtype, stride=131),
            rows(1, dtype=dtype).expand(5, 128),
            torch.randn(128, 5, device=DEVICE).to(dtype).t(),
        ):
            for s in (0.5, 2, 0.0, -0.0, 1e-7, float("nan")):
                pair.check(x, s, o)
                pair.check(x, s, misaligned)

        pair.check(rows(0, dtype=dtype), 0.5, rows(0, dtype=dtype))

    hits, misses, bypasses = pair.counts
    assert hits > misses
    assert bypasses == 0


def test_a_call_goes_to_the_stream_that_is_current():
    """LP27: work on a side stream is ordered with that stream."""

    pair = Results()
    x, o = rows(4096), torch.empty(4096, 128, dtype=torch.bfloat16, device=DEVICE)

    for _ in range(3):
        pair.check(x, 2.0, o)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    for value in range(2, 6):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            x.fill_(value)
            pair.planned(x, 2.0, o)
            result = o.clone()

        side.synchronize()
        assert torch.equal(result, torch.full_like(o, 2.0 * value))

    assert pair.counts[1:] == (1, 0)


def test_a_warm_call_is_captured_and_replays():
    """LP27: the graph computes from the new contents at each replay."""

    pair = Results()
    x, o = rows(), torch.empty(8, 128, dtype=torch.bfloat16, device=DEVICE)

    for _ in range(3):
        pair.check(x, 0.5, o)

    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        pair.planned(x, 3.0, o)

    with torch.cuda.graph(again := torch.cuda.CUDAGraph()):
        pair.planned(x, 3.0, o)

    for value in (1.0, 2.0, 5.0):
        for captured in (graph, again):
            x.fill_(value)
            o.zero_()
            captured.replay()
            assert torch.equal(o, torch.full_like(o, 3.0 * value))


def test_nothing_is_evicted_during_a_capture():
    """LP29: room for one plan, three layouts in a graph; evictions resume afterwards."""

    pair = Results(max_plans=1)
    tensors = [(rows(count), rows(count)) for count in (2, 3, 4)]

    # Compiled and loaded beforehand: loading a module is not allowed inside every capture.
    for x, o in tensors:
        pair.check(x, 0.5, o)

    evictions = pair.planned.cache_info().evictions
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        for x, o in tensors:
            pair.planned(x, 2.0, o)

    assert pair.planned.cache_info().evictions == evictions

    for x, _ in tensors:
        x.fill_(4.0)

    graph.replay()

    for _, o in tensors:
        assert torch.equal(o, torch.full_like(o, 8.0))

    for x, o in tensors:
        pair.check(x, 0.25, o)

    assert pair.planned.cache_info().evictions > evictions


def test_a_first_tuning_inside_a_capture_does_what_the_twin_does():
    """LP28: in processes of their own, for a broken capture may leave CUDA in an error."""

    program = """\
        import sys, torch
        sys.path.insert(0, {tests!r})
        import launch_kernels, ninetoothed_patches
        handle = launch_kernels.scale_t()
        if {planned}:
            handle = ninetoothed_patches.planned(handle)
        x = torch.ones(1000, device="cuda")
        o = torch.empty_like(x)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                handle(x, 3.0, o)
            print("captured")
        except Exception as error:
            print(type(error).__name__)
        if {planned}:
            assert handle.cache_info().plans <= 1
    """
    outputs = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                textwrap.dedent(program).format(
                    tests=os.path.dirname(__file__), planned=planned
                ),
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=os.path.dirname(os.path.dirname(__file__)),
        ).stdout
        for planned in (False, True)
    ]
    assert outputs[0] == outputs[1] != ""


def test_reused_addresses_hold_new_contents():
    """LP23: freed and allocated again at the same place."""

    pair = Results()
    addresses = set()

    for value in range(8):
        x = torch.full((8, 128), float(value), device=DEVICE)
        o = torch.empty_like(x)
        pair.planned(x, 2.0, o)
        assert torch.equal(o, torch.full_like(o, 2.0 * value))
        addresses.add(x.data_ptr())
        del x, o

    assert len(addresses) < 8
    assert pair.counts == (7, 1, 0)


def test_calls_keep_no_memory():
    """LP16: the allocator has everything back."""

    pair = Results()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    for _ in range(4):
        x = torch.ones(1 << 16, 128, device=DEVICE)
        pair.planned(x, 2.0, x)
        del x

    assert torch.cuda.memory_allocated() == before


def test_a_grid_beyond_32_bits_raises_as_the_twin_does():
    """LP08: each time."""

    pair = Results()
    x = rows(1).expand(2**34, 128)

    for handle in (pair.twin, pair.planned, pair.planned):
        with pytest.raises(OverflowError):
            handle(x, 0.5, x)

    assert pair.planned.cache_info().plans == 0


def test_a_cpu_tensor_raises_as_the_twin_does():
    """LP25: its address would be taken for one on the GPU."""

    pair = Results()
    x, o = rows(), rows()

    for _ in range(3):
        pair.check(x, 0.5, o)

    for arguments in ((x.cpu(), 0.5, o), (x, 0.5, o.cpu())):
        raised = []

        for handle in (pair.twin, pair.planned):
            with pytest.raises(ValueError, match="cpu tensor") as error:
                handle(*arguments)

            raised.append(str(error.value))

        assert raised[0] == raised[1]

    assert pair.planned.cache_info().bypasses == {"foreign device": 2}


def test_pinned_memory_works_as_it_does_for_the_twin():
    """LP25: Triton takes pinned host memory."""

    pair = Results()
    x = torch.randn(8, 128).pin_memory()
    o = torch.empty(8, 128, device=DEVICE)

    for _ in range(2):
        pair.check(x, 2.0, o)

    assert pair.planned.cache_info().bypasses == {"foreign device": 2}


def test_threads_on_streams_of_their_own():
    """LP38: eight threads, each with its stream and tensors, results right."""

    pair = Results(max_plans=3)
    pair.planned(rows(), 0.5, rows())
    torch.cuda.synchronize()

    def calls(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(200):
                count = 1 + (index + step) % 5
                x = torch.full((count, 128), float(step), device=DEVICE)
                o = torch.empty_like(x)
                pair.planned(x, 2.0, o)

                assert torch.equal(o, 2.0 * x), (index, step)

    assert in_threads(8, calls) == []
    assert sum(pair.counts) == 1 + 8 * 200


def test_the_profiler_sees_every_launch():
    """LP34: PyTorch's profiler reads the device's own records."""

    pair = Results()
    x, o = rows(), rows()

    for _ in range(3):
        pair.check(x, 0.5, o)

    with torch.profiler.profile(
        activities=[
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.CUDA,
        ]
    ) as profiler:
        for _ in range(10):
            pair.planned(x, 0.5, o)

        torch.cuda.synchronize()

    name = pair.planned._kernel.__name__
    assert (
        sum(event.count for event in profiler.key_averages() if event.key == name) == 10
    )


def test_proton_sees_every_launch(tmp_path):
    """LP34: so does Triton's profiler, with its launch hooks on.

    In a process of its own: CUDA has one subscriber, which PyTorch's profiler is once used.
    """

    pytest.importorskip("triton.profiler", reason="this Triton has no proton")
    program = """
        import sys, torch
        import triton.profiler as proton
        import launch_kernels, ninetoothed_patches

        planned = ninetoothed_patches.planned(launch_kernels.scale())
        x, o = torch.randn(4, 128, device="cuda"), torch.empty(4, 128, device="cuda")

        for _ in range(3):
            planned(x, 0.5, o)

        session = proton.start(sys.argv[1], hook="triton")

        for _ in range(10):
            planned(x, 0.5, o)

        torch.cuda.synchronize()
        proton.finalize(session)
        assert planned.cache_info().bypasses == {"launch hook": 10}
        print(planned._kernel.__name__)
    """
    paths = [os.path.dirname(__file__), *sys.path]
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "profile")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert finished.returncode == 0, finished.stderr

    (profile,) = tmp_path.glob("profile*")
    root = json.loads(profile.read_text())[0]

    assert launches_of_profile(root, finished.stdout.strip()) == 10


def launches_of_profile(node, name):
    """How often a kernel of this name was launched, in a tree of proton's."""

    count = node["metrics"].get("count", 0) if node["frame"]["name"] == name else 0

    return count + sum(launches_of_profile(child, name) for child in node["children"])


def test_a_jagged_call_computes_what_the_twin_does():
    """LP50: lengths are read at each call."""

    twin = launch_kernels.jagged()
    planned = ninetoothed_patches.planned(launch_kernels.jagged())

    def nested(values, lengths):
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)

        return torch.nested.nested_tensor_from_jagged(values, offsets)

    for lengths in ((5, 3), (1, 7), (4, 4)):
        values = torch.randn(8, 128, device=DEVICE)
        results = []

        for handle in (twin, planned):
            o = nested(torch.zeros_like(values), lengths)
            handle(nested(values, lengths), 2.0, o)
            results.append(o.values())

        assert torch.equal(*results)
        assert torch.equal(results[0], 2.0 * values)

    assert planned.cache_info().bypasses == {"jagged": 3}


def test_dynamo_captures_the_kernel_as_it_does_unpatched():
    """A planned handle inside torch.compile, without a graph break."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())

    @torch.compile(fullgraph=True)
    def compiled(x):
        o = torch.empty_like(x)
        handle(x + 1, 3.0, o)

        return o * 2

    x = torch.randn(8, 128, device=DEVICE)
    assert torch.allclose(compiled(x), (x + 1) * 6)
    assert handle.cache_info().bypasses == {"tracing": 1}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_launches_its_own_kernel():
    """LP24: cuda:0, cuda:1, and cuda:0 again."""

    pair = Results()

    for device in (0, 1, 0, 1, 0):
        with torch.cuda.device(device):
            x = torch.randn(8, 128, device=f"cuda:{device}")
            pair.check(x, 0.5, torch.empty_like(x))

    assert pair.counts == (3, 2, 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current_use_no_plan():
    """LP25: in a process of its own, for Triton itself may fault."""

    program = f"""\
        import sys, torch
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import launch_kernels, ninetoothed_patches
        handle = ninetoothed_patches.planned(launch_kernels.scale())
        for _ in range(3):
            x = torch.ones(8, 128, device="cuda:0")
            handle(x, 2.0, x)
        x = torch.ones(8, 128, device="cuda:1")
        try:
            handle(x, 2.0, x)
        except Exception as error:
            print(type(error).__name__)
        info = handle.cache_info()
        assert info.bypasses == {{"foreign device": 1}}, info
        assert info.plans == 1
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
