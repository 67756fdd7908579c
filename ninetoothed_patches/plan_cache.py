"""The plans of one handle: found, made, counted, bounded, dropped. One control flow for plain and auto-tuned kernels."""

import collections
import dataclasses
import heapq
import itertools
import operator
import os
import threading
import weakref

import torch

from ninetoothed_patches import triton_abi
from ninetoothed_patches.call_key import (
    ALIGNMENT,
    CallReader,
    compile_function,
    tensor_guard,
)
from ninetoothed_patches.launch_plan import Plan, Watcher, prepare_launch

# How many plans a call is compared with before its key is made. A kernel of a model usually sees one layout a step, or
# two that alternate (queries and keys); a comparison that fails costs about 0.3 us, a key 3.
RECENT_PLANS = 4

_ENTRY = """\
def {name}({parameters}):
    if is_dynamo_compiling():
        return trace({parameters})

    try:
        {read_addresses}
        unaligned = ({any_address}) % 16 and ({alignments})

        for plan in cache.recent:
            if (
                plan.fits({tensors})
                and plan.driver is {driver}
                and plan.current_device() == plan.device
                and plan.alignments == unaligned
                {scalars_fit}
                and plan.state == {state}
                and plan.store is {stores}[plan.device]
                {tuner_fits}
                and not ({watchers})
            ):
                break
        else:
            plan = None
    except Exception:
        # `cache.call` meets it again, and decides whose error it is.
        plan = None

    if plan is None:
        return cache.call({parameters})

    plan.stamp = next(clock)
    plan.launch(plan.current_stream(plan.device), {addresses})
"""

# `is` for the object that is passed again and again; otherwise equal, of one type, and not one of the zeros.
_SCALAR_FITS = """\
and (
                    {name} is plan.scalars[{position}]
                    or type({name}) is type(plan.scalars[{position}])
                    and {name} == plan.scalars[{position}]
                    and {name}
                )"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """What became of the calls so far.

    :param hits: Calls that were launched from a plan.
    :param misses: Calls that went the ordinary way, and from which a plan was made (unless they raised).
    :param bypasses: Calls that went the ordinary way because a plan could not be proved the same, by reason.
    :param evictions: Plans that had to go because the cache was full.
    :param plans: How many plans are held now.
    :param bound: How many may be held, per handle.
    :param handles: The same for each handle, by kernel name and a number.
    """

    hits: int = 0
    misses: int = 0
    bypasses: dict = dataclasses.field(default_factory=dict)
    evictions: int = 0
    plans: int = 0
    bound: int | None = None
    handles: dict = dataclasses.field(default_factory=dict)


class PlanCache:
    """The plans of one handle.

    :param kernel: The handle's JITFunction (or what the interpreter made of it).
    :param launched: What the launch function calls: the kernel, or the auto-tuner around it.
    :param launch: The generated launch function.
    :param watch: A function that makes the launch function call a given object in the kernel's place.
    :param parameters: Pairs of each parameter's name and the kernel's parameter that takes its address: a name, None
        for a tensor whose address the kernel does not take, or False for a scalar.
    :param never: Why no call of this handle can be planned, or None.
    :param bound: How many plans may be held.
    """

    def __init__(self, *, kernel, launched, launch, watch, parameters, never, bound):
        self.name = kernel.__name__
        self.number = next(_NUMBERS)
        self.bound = bound
        self.tuned = 0

        self._misses = 0
        self._evictions = 0
        self._bypasses = collections.Counter()
        self._kernel = kernel
        self._tuner = launched if launched is not kernel else None
        self._launch = launch
        self._never = never
        self._reader = CallReader(
            [(name, pointer is not False) for name, pointer in parameters]
        )
        self._pointers = [
            (pointer, index)
            for index, (_, pointer) in enumerate(parameters)
            if pointer is not False
        ]
        self._clock = itertools.count(1)
        self._clock_looks = 0
        self._watcher = Watcher(launched)
        self._watched_launch = watch(self._watcher)
        self._reset()
        self.entry = self._never_entry() if never else self._entry(parameters)
        _CACHES.add(self)

    def _reset(self):
        # The first is held while an ordinary call is watched or tunes, which takes as long as compiling; the second
        # only while plans and counters change.
        self._calling = threading.RLock()
        self._changing = threading.RLock()
        self._plans = {}
        self._queue = []
        self.recent = ()

    def clear(self):
        """Drop all plans. The counters stay."""

        with self._changing:
            for plan in self._plans.values():
                plan.is_kept = False

            self._plans.clear()
            self._queue.clear()
            self.recent = ()

    def after_fork_in_child(self):
        """The parent's modules mean nothing in the child, and its locks may be held by a thread that is not there."""

        self._reset()
        self._watcher.take()

    def info(self):
        with self._changing:
            return CacheInfo(
                hits=self._hits(),
                misses=self._misses,
                bypasses=dict(self._bypasses),
                evictions=self._evictions,
                plans=len(self._plans),
                bound=self.bound,
            )

    def _hits(self):
        # `next` is the one way to count from several threads without a lock. Looking counts too, so looks are counted.
        self._clock_looks += 1

        return next(self._clock) - self._clock_looks

    def _count_bypass(self, reason):
        with self._changing:
            self._bypasses[reason] += 1

    # The entry: what a call of the handle runs.

    def _entry(self, parameters):
        expressions = triton_abi.expressions()
        names = [name for name, _ in parameters]
        tensors = self._reader.tensor_names
        scalars = [name for name, pointer in parameters if pointer is False]
        source = _ENTRY.format(
            name=self._launch.__name__,
            parameters=", ".join(names),
            tensors=", ".join(tensors),
            read_addresses="\n        ".join(
                f"{name}_address = {name}.data_ptr()" for name in tensors
            ),
            any_address=" | ".join(f"{name}_address" for name in tensors),
            alignments="".join(f"{name}_address % 16 == 0, " for name in tensors),
            addresses=", ".join(f"{name}_address" for name in tensors),
            scalars_fit="\n                ".join(
                _SCALAR_FITS.format(name=name, position=position)
                for position, name in enumerate(scalars)
            ),
            tuner_fits="and len(tuner.cache) == cache.tuned" if self._tuner else "",
            driver=expressions.driver,
            state=expressions.state,
            stores=expressions.stores,
            watchers=expressions.watchers,
        )
        state = compile_function(
            f"def state():\n    return {expressions.state}",
            "state",
            jit=self._kernel,
            **expressions.names,
        )
        stores = compile_function(
            f"def stores():\n    return {expressions.stores}",
            "stores",
            jit=self._kernel,
            **expressions.names,
        )
        self._state, self._stores = state, stores

        return compile_function(
            source,
            self._launch.__name__,
            cache=self,
            clock=self._clock,
            jit=self._kernel,
            tuner=self._tuner,
            trace=self._trace(),
            is_dynamo_compiling=torch.compiler.is_dynamo_compiling,
            **expressions.names,
        )

    def _never_entry(self):
        def bypass(*args, **kwargs):
            return self._bypass(self._never, args, kwargs)

        return bypass

    def _trace(self):
        """The launch function, for Dynamo to trace through; counted when it does."""

        launch = self._launch

        @torch.compiler.assume_constant_result
        def count():
            self._count_bypass("tracing")

        def trace(*arguments):
            count()

            return launch(*arguments)

        return trace

    # The long way.

    def call(self, *arguments):
        """A call that no recent plan fits."""

        reason = self._reader.unreadable(arguments)

        if reason is None and triton_abi.launches_are_watched(self._kernel):
            reason = "launch hook"

        if reason is not None:
            return self._bypass(reason, arguments)

        try:
            key, addresses = self._reader.read(*arguments)
        except Exception:
            # Its metadata cannot be read: the ordinary call will say so.
            return self._bypass("unreadable tensor", arguments)

        driver = triton_abi.active_driver()
        current_device, current_stream = triton_abi.current_device_and_stream(driver)
        device = current_device()
        rule = triton_abi.tensor_rule(self._kernel, device)

        if rule is not None:
            key += tuple(map(rule, self._reader.tensors(arguments)))

        call = _Call(arguments, driver, device, key)
        plan = self._find(call)

        if plan is None:
            home = driver.get_active_torch_device()

            if any(tensor.device != home for tensor in self._reader.tensors(arguments)):
                return self._bypass("foreign device", arguments)

            return self._prepare(call)

        if rule is None:
            self._remember(plan, arguments)

        plan.stamp = next(self._clock)
        plan.launch(current_stream(device), *addresses)

    def _key(self, call):
        return (call.driver, call.device, self._state(), *call.key)

    def _find(self, call):
        if self._tuner is not None and len(self._tuner.cache) != self.tuned:
            with self._calling:
                # No tuning is under way now: somebody has cleared the tuner's cache, or filled it.
                if len(self._tuner.cache) != self.tuned:
                    self.clear()
                    self.tuned = len(self._tuner.cache)

        plan = self._plans.get(self._key(call))

        if plan is not None and plan.store is not self._stores()[call.device]:
            # Somebody has cleared Triton's kernels: what was compiled then may differ from what would be now.
            self.clear()

            return None

        return plan

    def _bypass(self, reason, arguments, keywords=None):
        self._count_bypass(reason)

        return self._ordinary(self._launch, arguments, keywords or {})

    def _ordinary(self, launch, arguments, keywords):
        """The unpatched call. An auto-tuner keeps a call's state in itself: one call at a time."""

        if self._tuner is None:
            return launch(*arguments, **keywords)

        with self._calling:
            try:
                return launch(*arguments, **keywords)
            finally:
                self.tuned = len(self._tuner.cache)

    def _prepare(self, call):
        """An ordinary call, watched, and a plan made from it."""

        with self._calling:
            if self._key(call) in self._plans:
                # Another thread has made it while this one waited.
                return self.call(*call.arguments)

            try:
                self._ordinary(self._watched_launch, call.arguments, {})
            except BaseException:
                self._watcher.take()

                with self._changing:
                    self._misses += 1

                raise

            launched = self._watcher.take()
            reason = self._unplannable(launched)

            if reason is None:
                launch = prepare_launch(launched, self._pointers, call.arguments)
                reason = "unexpected kernel arguments" if launch is None else None

            if reason is not None:
                self._count_bypass(reason)
            else:
                self._keep(self._plan(call, launched[2], launch))

    def _plan(self, call, compiled, launch):
        plan = Plan()
        # Made now: the first call compiles, and that gives the kernel the hash which is part of the state.
        plan.key = self._key(call)
        plan.driver = call.driver
        plan.device = call.device
        plan.current_device, plan.current_stream = triton_abi.current_device_and_stream(
            call.driver
        )
        plan.state = self._state()
        plan.store = self._stores()[call.device]
        plan.compiled = compiled
        plan.launch = launch
        plan.alignments = self._alignments(call.arguments)
        plan.scalars = self._reader.scalars(call.arguments)
        plan.fits = None
        plan.is_kept = True

        return plan

    def _alignments(self, arguments):
        alignments = tuple(
            tensor.data_ptr() % ALIGNMENT == 0
            for tensor in self._reader.tensors(arguments)
        )

        return 0 if all(alignments) else alignments

    def _unplannable(self, launched):
        if launched is None or launched[-1] is None:
            return "not launched"

        if triton_abi.captured_globals(self._kernel):
            return "captured globals"

        if self._kernel.hash is None:
            return "source changed"

        if launched[-1].function is None:
            return "not loaded"

        if self._tuner is not None and triton_abi.winner_has_hook(self._tuner):
            return "configuration with a pre-hook"

        return None

    def _keep(self, plan):
        with self._changing:
            self._misses += 1

            while len(self._plans) >= self.bound:
                if _is_capturing():
                    # What is unloaded during a capture breaks it. The call was right without its plan being kept.
                    return

                self._evict()

            self._clock_looks += 1
            plan.stamp = next(self._clock)
            self._plans[plan.key] = plan
            heapq.heappush(self._queue, (plan.stamp, plan))

    def _evict(self):
        """Drop the least recently used plan. Stamps in the queue lag behind, and are brought up to date here."""

        while self._queue[0][0] != self._queue[0][1].stamp:
            plan = self._queue[0][1]
            heapq.heapreplace(self._queue, (plan.stamp, plan))

        _, plan = heapq.heappop(self._queue)
        del self._plans[plan.key]
        plan.is_kept = False
        self.recent = tuple(other for other in self.recent if other is not plan)
        self._evictions += 1

    def _remember(self, plan, arguments):
        """Make `plan` one of those that the next call is compared with first."""

        with self._changing:
            scalars = self._reader.scalars(arguments)
            has_new_scalars = any(
                scalar is not other
                for scalar, other in zip(scalars, plan.scalars, strict=True)
            )

            if plan.fits is None or (plan in self.recent and not has_new_scalars):
                # None yet, or it said no: tensors of another autograd mode, or one tensor passed twice.
                plan.fits = tensor_guard(self._reader.tensors(arguments))

            plan.scalars = scalars

            if plan.fits is None or not plan.is_kept or plan in self.recent:
                return

            newest_first = sorted(
                self.recent, key=operator.attrgetter("stamp"), reverse=True
            )
            self.recent = (plan, *newest_first[: RECENT_PLANS - 1])


@dataclasses.dataclass(frozen=True)
class _Call:
    arguments: tuple
    driver: object
    device: int
    key: tuple


def _is_capturing():
    capturing = getattr(torch.get_device_module(), "is_current_stream_capturing", None)

    return capturing is not None and capturing()


# Every handle's cache, for as long as the handle lives.
_CACHES = weakref.WeakSet()

_NUMBERS = itertools.count()


def caches():
    return list(_CACHES)


def total_info(bound):
    """The sum over all handles that are alive, and each of them by name."""

    handles, names = {}, collections.Counter()

    for cache in sorted(caches(), key=operator.attrgetter("number")):
        names[cache.name] += 1
        handles[f"{cache.name}#{names[cache.name]}"] = cache.info()

    infos = handles.values()

    return CacheInfo(
        hits=sum(info.hits for info in infos),
        misses=sum(info.misses for info in infos),
        bypasses=dict(
            sum(
                (collections.Counter(info.bypasses) for info in infos),
                start=collections.Counter(),
            )
        ),
        evictions=sum(info.evictions for info in infos),
        plans=sum(info.plans for info in infos),
        bound=bound,
        handles=handles,
    )


def _after_fork_in_child():
    for cache in caches():
        cache.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
