"""The plans of one handle: found, made, counted, bounded, dropped. One control flow for plain and auto-tuned kernels."""

import collections
import copy
import heapq
import itertools
import operator
import os
import threading
import types
import weakref

import torch

from ninetoothed_patches import triton_abi
from ninetoothed_patches.call_functions import call_functions
from ninetoothed_patches.call_key import CallReader, tensor_guard
from ninetoothed_patches.counters import CacheInfo
from ninetoothed_patches.launch_plan import Kind, LaunchForm, Plan, Watcher
from ninetoothed_patches.locks import CallLock, is_held_here, is_in_a_call

# How many plans a call is compared with before its key is made: those that came next when the last plan was used before.
# A model calls a kernel with one layout, or with some in an order that each step repeats. A comparison that fails costs
# about 0.3 us, a key and its look-up 4.
MAX_SUCCESSORS = 4

# How many plans in a row may be made and never used. After one more, a call has to come twice before it gets one: making
# it costs much of an ordinary call again, and there are workloads in which nothing comes twice.
UNUSED_PLANS = 16

# How many calls that came once are remembered, beside those that have plans.
MAX_SEEN = 4096

# Held while plans and counters change, of all handles: what one handle's change is interrupted by (a finalizer, a signal
# handler) may call another. So no thread may wait for anything while it holds this, and none waits long for it.
_CHANGING = threading.RLock()

_NO_KEYWORDS = types.MappingProxyType({})


class _Start:
    """Stands for the last plan where there is none."""

    is_kept = True

    def __init__(self):
        self.successors = ()


class PlanCache:
    """The plans of one handle.

    `entry` is the handle's `__call__`: it takes the handle and the launch function's arguments, and returns None as that
    function does.

    :param kernel: The handle's JITFunction (or what the interpreter made of it).
    :param launched: What the launch function calls: the kernel, or the auto-tuner around it.
    :param launch: The generated launch function.
    :param replace: A function that makes of the launch function one that calls a given object in `launched`'s place.
    :param parameters: For each parameter of the launch function, its name and the name of the kernel's parameter that
        takes its address: None for a scalar.
    :param never: Why no call of this handle can be planned, or None.
    :param bound: How many plans may be held.
    """

    def __init__(self, *, kernel, launched, launch, replace, parameters, never, bound):
        self.name = kernel.__name__
        self.number = next(_NUMBERS)
        self.bound = bound
        # How many results the auto-tuner had after the last call that went through here.
        self.tuned = 0

        self._kernel = kernel
        self._launched = launched
        self._tuner = launched if launched is not kernel else None
        self._launch = launch
        self._replace = replace
        self._reader = CallReader(
            [(name, pointer is not None) for name, pointer in parameters]
        )
        self._pointers = [
            (pointer, index)
            for index, (_, pointer) in enumerate(parameters)
            if pointer is not None
        ]

        self._clock = itertools.count(1)
        self._clock_looks = 0
        self._misses = 0
        self._evictions = 0
        self._bypasses = collections.Counter()

        self._reset()
        self._read = None

        if never:
            self.entry = self._never_entry(never)
        else:
            functions = call_functions(
                self,
                name=launch.__name__,
                reader=self._reader,
                kernel=kernel,
                tuner=self._tuner,
                clock=self._clock,
                ordinary=self._untouched(),
                max_unused=UNUSED_PLANS,
            )
            self.entry = functions.entry
            self._is_watched, self._look = functions.is_watched, functions.look
            self._read = functions.read
            self._make_repeater = functions.make_repeater

        _CACHES[self.number] = self

    def _reset(self):
        # Held while an ordinary call is watched or tunes, which takes as long as compiling.
        self._calling = _call_lock(self._tuner)
        self._watcher = Watcher(self._launched, self._replace)
        # The plan that was used last.
        self.last = _Start()
        self._plans = {}
        self._queue = []
        # How many plans were ever made: a thread that waited sees by it whether there may be a new one.
        self._made = 0
        # How many of the last plans were never used, and, where that is too many, the outlines of calls so far, hashed.
        self.unused = 0
        self.seen = set()
        self._forms = weakref.WeakKeyDictionary()
        # What stands in keys for each driver, device and kinds of arguments that can be planned.
        self._kinds = {}
        self._known_rule = None, None

    def clear(self):
        """Drop all plans. The counters stay."""

        with _CHANGING:
            # Not emptied but replaced: this may come in the middle of another change, which goes on with the old ones.
            # They are freed when nothing is held.
            plans, self._plans, self._queue = self._plans, {}, []
            self.seen = set()
            self.unused = 0
            self.last = _Start()

            for plan in plans.values():
                plan.drop()

    def after_fork_in_child(self):
        """The parent's modules mean nothing in the child, and its locks may be held by a thread that is not there."""

        for plan in self._plans.values():
            plan.drop()

        self._reset()

    def info(self):
        with _CHANGING:
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
        with _CHANGING:
            self._bypasses[reason] += 1

    # The entry, and what it calls.

    def _never_entry(self, reason):
        def bypass(handle, /, *arguments, **keywords):
            self._count_bypass(reason)

            return self.ordinary(arguments, keywords)

        return bypass

    def _untouched(self):
        """The launch function itself, for Dynamo to trace through (counted when it does), or to raise its TypeError."""

        launch = self._launch

        def count():
            self._count_bypass("tracing")

        # All that `torch.compiler.assume_constant_result` does but import Dynamo, which a first call would wait for.
        count._dynamo_marked_constant = True

        def ordinary(*arguments):
            if torch.compiler.is_dynamo_compiling():
                count()

            return launch(*arguments)

        return ordinary

    def unreadable(self, arguments):
        """A call whose key could not be made."""

        self._count_bypass(
            "launch hook"
            if self._is_watched()
            else self._reader.unplannable(arguments) or "unreadable call"
        )

        return self.ordinary(arguments)

    def ordinary(self, arguments, keywords=_NO_KEYWORDS):
        """A call that gets no plan."""

        if self._tuner is not None and _is_nested():
            self._notice_tuner()
            # Of the tuner's state, a call's own and results, it shares only the results: so nobody is waited for.
            launch = self._replace(copy.copy(self._tuner))

            return launch(*arguments, **keywords)

        return self._ordinary(self._launch, arguments, keywords)

    def new(self, outline, arguments):
        """A call of an outline that is not among `seen`: it gets no plan, and the next one does."""

        with _CHANGING:
            if len(self.seen) >= MAX_SEEN + len(self._plans):
                self._see_plans_only()

            self.seen.add(hash(outline))
            self._misses += 1

        return self.ordinary(arguments)

    def _see_plans_only(self):
        self.seen = set(map(self._outline_hash, self._plans.values()))

    def _outline_hash(self, plan):
        return hash(plan.key[-1][0])

    def call(self, call_key, arguments, addresses, *, has_waited=False):
        """A call that no successor of the last plan fits.

        :param call_key: Its `kinds` and `layout`, as `CallReader` writes them out.
        :param arguments: The launch function's arguments, by position.
        :param addresses: Those of the tensors among them.
        :param has_waited: Whether it comes again, after it has waited for another call of this handle.
        """

        if not has_waited and _is_nested():
            self._count_bypass("nested call")

            return self.ordinary(arguments)

        made = self._made
        driver, device, state, store, is_watched = self._look()
        rule = self._tensor_rule(store)
        kinds, layout = call_key
        kind = self._kinds.get((driver, device, kinds))

        if rule is not None:
            layout += tuple(map(rule, self._reader.tensors_of(arguments)))

        if self._tuner is not None and len(self._tuner.cache) != self.tuned:
            self._calling.run(self._notice_tuner)

        if is_watched:
            reason = "launch hook"
        elif kind is None:
            kind, reason = self._new_kind(driver, device, kinds, arguments)
        else:
            reason = None

        if reason is not None:
            self._count_bypass(reason)

            return self.ordinary(arguments)

        key = (kind, state, layout)
        plan = self._plans.get(key)

        if plan is not None and plan.store is not store:
            # Somebody has cleared Triton's kernels: what was compiled then may differ from what would be now.
            self.clear()
            plan = None

        if plan is None:
            return self._calling.run(
                self._prepare, key, store, call_key, arguments, addresses, made
            )

        self._remember(plan, arguments, can_guard=rule is None)
        plan.stamp = next(self._clock)
        plan.launch(plan.current_stream(device), *addresses)

    def repeater(self, arguments):
        """See `ninetoothed_patches.repeater`."""

        if self._read is None:
            return None

        try:
            (kinds, layout), addresses = self._read(*arguments)
            driver, device, state, _, _ = self._look()
            kind = self._kinds.get((driver, device, kinds))
            # Where the backend has a rule for tensors, no key is without its answers, which addresses do not give.
            plan = self._plans.get((kind, state, layout))
        except Exception:
            # No call that can be planned, and so none that has a plan.
            return None

        if plan is None or not plan.is_kept:
            return None

        if plan.launch is None:
            self._finish(plan)

        return self._make_repeater(plan, driver, device, plan.state, plan.store)

    def _tensor_rule(self, store):
        known = self._known_rule

        if known[0] is not store:
            known = self._known_rule = store, triton_abi.tensor_rule(store)

        return known[1]

    def _notice_tuner(self):
        # Somebody has cleared the tuner's cache, or filled it. Where a nested call looks, it may be a tuning under way: then
        # plans are dropped that were right.
        if len(self._tuner.cache) != self.tuned:
            self.clear()
            self.tuned = len(self._tuner.cache)

    def _new_kind(self, driver, device, kinds, arguments):
        """What stands in keys for these, and None; or None, and why no such call can be planned."""

        home = driver.get_active_torch_device()
        reason = self._reader.unplannable(arguments)

        if reason is None and any(
            tensor.device != home for tensor in self._reader.tensors_of(arguments)
        ):
            reason = "foreign device"

        if reason is not None:
            return None, reason

        return self._kinds.setdefault(
            (driver, device, kinds), Kind(driver, device)
        ), None

    def _ordinary(self, launch, arguments, keywords=_NO_KEYWORDS):
        """The unpatched call. An auto-tuner keeps a call's state in itself: one call at a time."""

        if self._tuner is None:
            return launch(*arguments, **keywords)

        return self._calling.run(self._tuned, launch, arguments, keywords)

    def _tuned(self, launch, arguments, keywords):
        self._notice_tuner()

        try:
            return launch(*arguments, **keywords)
        finally:
            self.tuned = len(self._tuner.cache)

    # Plans, made and dropped.

    def _prepare(self, key, store, call_key, arguments, addresses, made):
        """An ordinary call, watched, and a plan made from it."""

        if self._made != made:
            # While this thread waited, another has made a plan, maybe this one.
            return self.call(call_key, arguments, addresses, has_waited=True)

        plans = self._plans

        try:
            launched = self._ordinary(self._watcher.watch, arguments)
        except BaseException:
            with _CHANGING:
                self._misses += 1

            raise

        reason = self._unplannable(launched, arguments)

        if reason is not None:
            self._count_bypass(reason)

            return

        kind, state, layout = key

        if state[0] is not self._kernel.hash:
            # The first call compiles, and that gives the kernel its hash.
            _, _, state, _, _ = self._look()
            key = (kind, state, layout)

        self._keep(Plan(key, store, launched), plans)

    def _unplannable(self, launched, arguments):
        """Why what was launched cannot be planned, or None. Afterwards `launched` holds no tensor of the call."""

        if launched is None:
            return "not launched"

        bound, _, compiled = launched

        for pointer, index in self._pointers:
            if bound.get(pointer) is not arguments[index]:
                return "unexpected kernel arguments"

            bound[pointer] = None

        if triton_abi.captured_globals(self._kernel):
            return "captured globals"

        if self._kernel.hash is None:
            return "source changed"

        if compiled.function is None:
            return "not loaded"

        if self._tuner is not None and triton_abi.winner_has_hook(self._tuner):
            return "configuration with a pre-hook"

        return None

    def _keep(self, plan, plans):
        """Keep a plan, unless `plans`, those when its call began, have been dropped since."""

        # Freed when nothing is held.
        dropped = []

        with _CHANGING:
            self._misses += 1

            # At once: a finalizer may drop all plans between two lines.
            plans_now, queue = self._plans, self._queue

            if plans_now is not plans:
                # What was dropped may be why: a tuner's choice that somebody replaced. Or this is a child that was forked
                # within the call, whose kernel is the parent's.
                return

            while len(plans) >= self.bound:
                if _is_capturing():
                    # What is unloaded during a capture breaks it. The call was right without its plan being kept.
                    return

                dropped.append(self._evict(plans, queue))

            self._clock_looks += 1
            self._made += 1
            plan.stamp = next(self._clock)

            if plan.key in plans:
                # A source was replaced and put back: what was made in between is of no use.
                dropped += plans.values()
                self.clear()
                plans, queue = self._plans, self._queue

            # In this order: what a signal handler that raises leaves in the queue alone is thrown out, and what it left
            # among the plans alone would never be.
            heapq.heappush(queue, (plan.stamp, plan))
            plans[plan.key] = plan

            if self._plans is plans:
                self.last = plan

            if self.unused > UNUSED_PLANS:
                self.seen.add(self._outline_hash(plan))

            self.unused += 1

            if self.unused == UNUSED_PLANS + 1:
                self._see_plans_only()

    def _evict(self, plans, queue):
        """Drop the least recently used plan. Stamps in the queue lag behind, and are brought up to date here."""

        while queue[0][0] != queue[0][1].stamp:
            plan = queue[0][1]
            heapq.heapreplace(queue, (plan.stamp, plan))

        plan = queue[0][1]

        if plans.get(plan.key) is plan:
            del plans[plan.key]
            self._evictions += 1

        plan.drop()
        heapq.heappop(queue)

        return plan

    def _remember(self, plan, arguments, *, can_guard):
        """Make `plan` the last one, and a successor of the one before."""

        last = self.last
        scalars = self._reader.scalars_of(arguments)
        fits = None

        if plan.launch is None:
            self._finish(plan)

        if can_guard and (plan.fits is None or plan in last.successors):
            tensors = self._reader.tensors_of(arguments)

            # A successor was compared. Its guard says no to another autograd mode, and to a tensor that is passed twice.
            if plan.fits is None or not plan.fits(*tensors):
                fits = tensor_guard(tensors)

        # What is built of many objects, where the collector mostly comes, is there by now.
        with _CHANGING:
            plan.fits = fits or plan.fits
            plan.scalars = scalars

            if plan.fits is None or not plan.is_kept:
                return

            self.last = plan

            # Else one that was dropped, and is still the successor of another, would keep this one, and this one the next.
            if last.is_kept and plan not in last.successors:
                others = [other for other in last.successors if other.is_kept]
                last.successors = (plan, *others[: MAX_SUCCESSORS - 1])

    def _finish(self, plan):
        """Prepare the launch of a plan that is used for the first time.

        A layout that is seen only once, and there are workloads of nothing else, does not pay for this.
        """

        with _CHANGING:
            self.unused = 0

        launched = plan.launched

        if launched is None:
            # Another thread, or a finalizer in this one, has just done it.
            return

        bound, grid, compiled = launched
        form = self._forms.get(compiled)

        if form is None:
            form = LaunchForm(compiled, bound, [name for name, _ in self._pointers])
            self._forms[compiled] = form

        kind, plan.state, (_, plan.alignments, *_) = plan.key
        plan.driver, plan.device = kind.driver, kind.device
        plan.current_device, plan.current_stream = triton_abi.current_device_and_stream(
            plan.driver
        )
        # In this order: where the launch is none yet, what it is made from is still there.
        plan.launch = form.bind(grid, bound)
        plan.launched = None


# The locks of auto-tuners: two handles may be made from one, and then share its tuner.
_TUNER_LOCKS = weakref.WeakKeyDictionary()


def _call_lock(tuner):
    """What is held while a handle's ordinary call is watched or tunes: a lock of its own where it has no tuner."""

    if tuner is None:
        return CallLock()

    with _CHANGING:
        return _TUNER_LOCKS.setdefault(tuner, CallLock())


def _is_nested():
    """Whether this thread is in the middle of a call that others may wait for, or of a change of plans.

    Python runs finalizers and signal handlers anywhere. A call that comes from one must not wait for another thread, which
    may be waiting for this one, and must find no plans that have changed by half.
    """

    return is_held_here(_CHANGING) or is_in_a_call()


def _is_capturing():
    module = torch.get_device_module()
    capturing = getattr(module, "is_current_stream_capturing", None)

    # A build of PyTorch for a GPU that is not there has the function, which then raises.
    return capturing is not None and module.is_initialized() and capturing()


# Every handle's cache by its number, for as long as the handle lives.
_CACHES = weakref.WeakValueDictionary()

_NUMBERS = itertools.count()


def caches():
    # One step of the interpreter, unlike going through a weak set: another thread may make a handle meanwhile.
    references = _CACHES.valuerefs()

    return [cache for reference in references if (cache := reference()) is not None]


def infos():
    """What became of the calls of each handle that is alive, by the kernel's name and a number."""

    named, names = {}, collections.Counter()

    for cache in sorted(caches(), key=operator.attrgetter("number")):
        names[cache.name] += 1
        named[f"{cache.name}#{names[cache.name]}"] = cache.info()

    return named


def _after_fork_in_child():
    global _CHANGING, _TUNER_LOCKS

    _CHANGING = threading.RLock()
    _TUNER_LOCKS = weakref.WeakKeyDictionary()

    for cache in caches():
        cache.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
