"""Threads, streams, processes and devices on a GPU: each result has the bits of a serial one."""

import collections
import os
import pathlib
import random
import subprocess
import sys
import textwrap
import threading
import time

import launch_kernels
import pytest
import torch
from comparison import bits
from operator_calls import CALLS, copies, forget, whole_way
from threads import in_threads

import ninetoothed_patches
from ntops_ext import _handles
from ntops_ext.torch import _qk_norm_rope, gated_rms_norm

pytestmark = pytest.mark.gpu

TESTS = pathlib.Path(__file__).resolve().parent

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs"
)

SEEDS = range(3)

NUM_THREADS = 16


def handle_calls():
    """Calls of handles, like those of `operator_calls`: one that evicts all the time, one with room, a tuned one."""

    handles = {
        "handle that evicts": ninetoothed_patches.planned(
            launch_kernels.scale(), max_plans=1
        ),
        "handle": ninetoothed_patches.planned(launch_kernels.axpy()),
        "auto-tuned handle": ninetoothed_patches.planned(launch_kernels.scale_t()),
    }

    def randn(device, seed, *shape):
        generator = torch.Generator(device).manual_seed(seed)

        return torch.randn(shape, generator=generator, device=device)

    def scale(device, seed):
        x = randn(device, seed, 5 + seed, 128)
        o = torch.empty_like(x)

        def call():
            handles["handle that evicts"](x, 0.5, o)

            return o

        return call

    def axpy(device, seed):
        x, y = randn(device, seed, 2, 5 + seed, 128)
        o = torch.empty_like(x)

        def call():
            handles["handle"](x, y, o, 3.0)

            return o

        return call

    def tuned(device, seed):
        x = randn(device, seed, 1000)
        o = torch.empty_like(x)

        def call():
            handles["auto-tuned handle"](x, 0.25, o)

            return o

        return call

    return handles, dict(zip(handles, (scale, axpy, tuned), strict=True))


class Callees:
    """Everything that is called, and what a serial call of it gives, on some devices."""

    def __init__(self, *devices, is_warm=True):
        self.handles, calls = handle_calls()
        self.makers = {**CALLS, **calls}
        self.devices = devices
        self.kinds = [(name, seed) for name in self.makers for seed in SEEDS]
        self.expected = {}

        for device in devices:
            with torch.cuda.device(device), torch.no_grad():
                for name, seed in self.kinds:
                    self.expected[device, (name, seed)] = whole_way(
                        self.makers[name](device, seed)
                    )

        if not is_warm:
            ninetoothed_patches.clear_plans()
            _handles._make.cache_clear()
            _qk_norm_rope.eager_roundings._found.clear()
            self.handles, calls = handle_calls()
            self.makers |= calls

        forget()
        synchronize()

    def make(self, device):
        """A call of each kind, with tensors of its own."""

        with torch.cuda.device(device):
            calls = {
                (name, seed): self.makers[name](device, seed)
                for name, seed in self.kinds
            }
            torch.cuda.synchronize()

        return calls

    def count_wrong(self, device, kind, result):
        """How many elements are not what a serial call gives: a tensor, for nobody is to wait here."""

        results = result if isinstance(result, tuple) else (result,)
        wrong = torch.zeros((), dtype=torch.int64, device=device)

        for one, other in zip(results, self.expected[device, kind], strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            wrong += (bits(one) != bits(other)).sum()

        return wrong


def synchronize():
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


class Worker:
    """One thread's calls, each on a stream that is drawn: ordered among themselves, and with nobody else's.

    :param streams: Of each device, those that all threads share.
    """

    def __init__(self, callees, streams, index):
        self._callees = callees
        self._streams = streams
        self._generator = random.Random(index)
        self._calls = {device: callees.make(device) for device in callees.devices}
        self._last = {
            device: torch.cuda.current_stream(device) for device in callees.devices
        }
        self._wrong = []
        self.made = collections.Counter()

    def step(self):
        draw = self._generator.choice
        device, kind = draw(self._callees.devices), draw(self._callees.kinds)
        stream = draw(self._streams[device])
        stream.wait_stream(self._last[device])
        self._last[device] = stream

        with torch.cuda.stream(stream):
            result = self._call(device, kind)
            self._wrong.append(self._callees.count_wrong(device, kind, result))

        self.made[device, kind] += 1

        if len(self._wrong) == 64:
            self.check()

    def _call(self, device, kind):
        call = self._calls[device][kind]

        if kind[0] in CALLS:
            # An operator runs where its tensors are, whichever device is current.
            with torch.cuda.device(self._generator.choice(self._callees.devices)):
                return call()

        return call()

    def check(self):
        """Nothing was wrong so far."""

        for stream in self._last.values():
            stream.synchronize()

        wrong = [int(count) for count in self._wrong]
        self._wrong.clear()
        assert not any(wrong), wrong


def disturb(raw, generator):
    """What may happen at any time: plans are dropped, the patch comes and goes, handles are made."""

    generator.choice(
        [
            ninetoothed_patches.clear_plans,
            ninetoothed_patches.cache_info,
            ninetoothed_patches.apply,
            ninetoothed_patches.revert,
            lambda: ninetoothed_patches.planned(raw),
            forget,
        ]
    )()


def hammer(callees, seconds):
    """Calls from 16 threads on 6 streams a device; nothing is wrong, and every kind of call was made."""

    raw = launch_kernels.scale()
    streams = {
        device: [torch.cuda.Stream(device) for _ in range(6)]
        for device in callees.devices
    }
    workers = [Worker(callees, streams, index) for index in range(NUM_THREADS)]
    synchronize()
    deadline = time.monotonic() + seconds

    @torch.no_grad()
    def run(index):
        worker, generator = workers[index], random.Random(-index)

        # At least so many, however long the first calls take.
        while time.monotonic() < deadline or worker.made.total() < 20:
            worker.step()

            if generator.random() < 0.02:
                disturb(raw, generator)

        worker.check()

    try:
        assert in_threads(NUM_THREADS, run) == []
    finally:
        ninetoothed_patches.revert()
        synchronize()

    made = sum((worker.made for worker in workers), collections.Counter())
    assert made.keys() == callees.expected.keys()

    for handle in callees.handles.values():
        info = handle.cache_info()
        assert info.hits and info.misses
        assert info.bypasses == {}


def test_sixteen_threads_of_mixed_calls_on_several_streams():
    """For 5 seconds, from calls that are warm."""

    hammer(Callees("cuda:0"), 5)


def test_first_calls_of_sixteen_threads():
    """Handles are made, tuned and compiled, and PyTorch's rounding is observed, by whoever comes first."""

    hammer(Callees("cuda:0", is_warm=False), 1)


@pytest.mark.slow
def test_sixteen_threads_for_a_minute():
    """The same, for a minute."""

    hammer(Callees("cuda:0"), 60)


@needs_two_gpus
def test_sixteen_threads_on_two_devices():
    """Tensors on both devices at once, the one or the other current."""

    hammer(Callees("cuda:0", "cuda:1"), 5)


@needs_two_gpus
@pytest.mark.slow
def test_sixteen_threads_on_two_devices_for_a_minute():
    """The same, for a minute."""

    hammer(Callees("cuda:0", "cuda:1"), 60)


@needs_two_gpus
@torch.no_grad()
def test_streams_of_two_devices_wait_for_each_other():
    """What the one device computes late is copied to the other, and computed on there, over and over."""

    generator = torch.Generator("cuda:0").manual_seed(0)
    start = torch.randn(64, 256, generator=generator, device="cuda:0")
    handle = ninetoothed_patches.planned(launch_kernels.scale())

    def on(device, x):
        y = gated_rms_norm(x, gate=x)
        o = torch.empty_like(y).view(-1, 128)

        with torch.cuda.device(device):
            handle(y.view(-1, 128), 1.5, o)

        return o.view_as(x)

    expected = start

    for step in range(6):
        expected = on(f"cuda:{step % 2}", expected.to(f"cuda:{step % 2}"))
        synchronize()

    streams = [torch.cuda.Stream(index) for index in range(2)]

    # Each is current on its own device.
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        for _ in range(5):
            x = start

            for step in range(6):
                index = step % 2

                with torch.cuda.device(index):
                    torch.cuda._sleep(2_000_000)

                # PyTorch lets the two streams wait for each other around the copy.
                arrived = torch.empty_like(x, device=f"cuda:{index}")
                arrived.copy_(x, non_blocking=True)

                with torch.cuda.device(1 - index):
                    x = on(f"cuda:{index}", arrived)

            assert torch.equal(bits(x), bits(expected))


# Graphs.


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@torch.no_grad()
def test_one_thread_captures_while_another_launches(mode):
    """Each its own calls, on its own stream; the other's plans are dropped and made anew meanwhile."""

    callees = Callees("cuda:0")
    captured_calls, launched_calls = callees.make("cuda:0"), callees.make("cuda:0")
    kinds = callees.kinds
    # In the strictest mode nothing may ask for memory while another thread captures.
    launched_kinds = [kind for kind in kinds if kind[0] not in ("norm", "rope")]
    streams = [torch.cuda.Stream() for _ in range(2)]

    for calls, stream in zip((captured_calls, launched_calls), streams, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(4):
                for kind in kinds:
                    calls[kind]()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    takes_turn = [threading.Semaphore(0), threading.Semaphore(0)]
    results = {}

    @torch.no_grad()
    def capture():
        with torch.cuda.graph(graph, stream=streams[0], capture_error_mode=mode):
            for kind in kinds:
                takes_turn[1].release()
                assert takes_turn[0].acquire(timeout=60)
                results[kind] = captured_calls[kind]()

    @torch.no_grad()
    def launch():
        with torch.cuda.stream(streams[1]):
            for step in range(len(kinds)):
                assert takes_turn[1].acquire(timeout=60)

                try:
                    for kind in launched_kinds:
                        launched_calls[kind]()

                    if step % 3 == 2:
                        callees.handles["handle"]._cache.clear()
                finally:
                    takes_turn[0].release()

    assert in_threads(2, lambda index: (capture, launch)[index]()) == []
    torch.cuda.synchronize()

    for kind in launched_kinds:
        result = launched_calls[kind]()
        assert int(callees.count_wrong("cuda:0", kind, result)) == 0

    for _ in range(2):
        for result in results.values():
            for tensor in result if isinstance(result, tuple) else (result,):
                tensor.zero_()

        graph.replay()

        for kind, result in results.items():
            assert int(callees.count_wrong("cuda:0", kind, result)) == 0


# Processes.


def run_program(program):
    """Run it in a process of its own: a child that is forked must find CUDA as the program left it."""

    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_a_child_forked_before_cuda_is_initialised():
    """The patch is applied, which asks for no device; the child and the parent compute the same."""

    run_program(
        """
        import os, torch
        import launch_kernels, ninetoothed_patches, ntops_ext
        from ntops_ext import _handles
        assert ninetoothed_patches.apply()
        _handles.import_kernels()
        ninetoothed_patches.cache_info()
        ninetoothed_patches.clear_plans()
        assert not torch.cuda.is_initialized()

        def compute():
            handle = launch_kernels.scale()
            x = torch.full((8, 128), 3.0, device="cuda")
            for _ in range(3):
                handle(x, 2.0, o := torch.empty_like(x))
                y = ntops_ext.torch.gated_rms_norm(o)
            assert torch.equal(o, torch.full_like(o, 6.0))
            assert torch.allclose(y, torch.ones_like(o)), y
            assert handle.cache_info().hits == 2

        child = os.fork()
        if child == 0:
            try:
                compute()
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(1)
        compute()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


def test_a_child_forked_after_cuda_is_initialised_gets_the_twins_error():
    """CUDA cannot be used there: each call says so, as an unpatched one does, and the parent goes on."""

    run_program(
        """
        import os, signal, torch
        import launch_kernels, ninetoothed_patches, ntops_ext
        twin, handle = launch_kernels.scale(), ninetoothed_patches.planned(launch_kernels.scale())
        x = torch.ones(8, 128, device="cuda")
        o, out = torch.empty_like(x), torch.empty_like(x)
        calls = {
            "twin": lambda: twin(x, 2.0, o),
            "planned": lambda: handle(x, 2.0, o),
            "operator": lambda: ntops_ext.torch.gated_rms_norm(x),
            "operator, out": lambda: ntops_ext.torch.gated_rms_norm(x, out=out),
        }
        for _ in range(3):
            for call in calls.values():
                call()
        repeat = ninetoothed_patches.repeater(handle, x, 2.0, o)
        assert repeat(x.data_ptr(), o.data_ptr())
        torch.cuda.synchronize()

        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                assert not repeat(x.data_ptr(), o.data_ptr())
                raised = {}
                for name, call in calls.items():
                    for _ in range(2):
                        try:
                            call()
                        except RuntimeError as error:
                            raised[name] = str(error)
                assert raised.keys() == calls.keys(), raised
                assert raised["planned"] == raised["twin"], raised
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, status
        hits = handle.cache_info().hits
        for call in calls.values():
            call()
        assert torch.equal(o, 2.0 * x)
        assert handle.cache_info().hits == hits + 1
        """
    )


def results_of_a_spawned_child(results):
    with torch.no_grad():
        for name, make in CALLS.items():
            call = make("cuda", 0)

            for _ in range(4):
                result = copies(call())

            results.put((name, [bits(tensor).cpu().numpy() for tensor in result]))


@torch.no_grad()
def test_a_spawned_child_computes_the_same():
    """It initialises CUDA itself, while its parent uses it."""

    processes = torch.multiprocessing.get_context("spawn")
    results = processes.Queue()
    child = processes.Process(target=results_of_a_spawned_child, args=(results,))
    child.start()

    try:
        expected = {name: whole_way(make("cuda", 0)) for name, make in CALLS.items()}

        for _ in CALLS:
            name, actual = results.get(timeout=300)

            for one, other in zip(actual, expected[name], strict=True):
                assert torch.equal(torch.from_numpy(one), bits(other).cpu())
    finally:
        child.join(60)

    assert child.exitcode == 0
