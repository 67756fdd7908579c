"""Mistakes that somebody might make in the product, each in one place, for `check_mutations.py`.

They were chosen by reading the product, not its tests: a condition that is left out, a mask or
a rounding that goes missing, a part of a key that is forgotten, a stride of something else.
Each names the promise it breaks and the test files that should notice.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One mistake: `old`, which occurs in `file` exactly once, becomes `new`.

    :param name: What the mistake is, in a few words joined by hyphens.
    :param promise: What does not hold any longer.
    :param tests: The test files that should notice, or the tests, of files that take minutes.
    """

    name: str
    file: str
    old: str
    new: str
    promise: str
    tests: tuple


_HAZARDS = "tests/test_launch_hazards.py"
_TUNING = "tests/test_triton_runtime_auto_tuning.py"
_PLAN_CACHE = "tests/test_plan_cache.py"
_REPEATER = "tests/test_repeater.py"
_CALL_KEY = "tests/test_call_key.py"
_DEPENDENT = "tests/test_dependent_launch.py"
_TRITON_ABI = "tests/test_triton_abi.py"
_MATERIALIZER = "tests/test_materializer.py"
_SOURCE_FILES = "tests/test_source_files.py"
_PREPARED = "tests/test_prepared_calls.py"
_CHECKS = "tests/test_checks.py"
_ROWS = "tests/test_rows.py"
_CHUNKS = "tests/test_chunks.py"
_CONFIGS = "tests/test_configs.py"
_COMPILED = "tests/test_compiled.py"
_NN = "tests/test_nn.py"
_REGISTRY = "tests/test_registry.py"
_EAGER_ROUNDING = "tests/test_eager_rounding.py"
_GATED = "tests/test_gated_rms_norm.py"
_GATED_OFFLINE = "tests/test_gated_rms_norm_offline.py"
_GATED_BACKWARD_OFFLINE = "tests/test_gated_rms_norm_backward_offline.py"
_ROPE = "tests/test_qk_norm_rope_pack.py"
_ROPE_OFFLINE = "tests/test_qk_norm_rope_offline.py"
_ROPE_BACKWARD = "tests/test_qk_norm_rope_backward.py"
_GATED_KERNEL = "tests/interpreted/test_gated_rms_norm.py"
_GATED_BACKWARD_KERNEL = "tests/interpreted/test_gated_rms_norm_backward.py"
_ROPE_KERNEL = "tests/interpreted/test_qk_norm_rope_pack.py"
_ROPE_BACKWARD_KERNEL = "tests/interpreted/test_qk_norm_rope_backward.py"
_SUM_KERNEL = "tests/interpreted/test_sum_of_rows.py"
_PADDING = "tests/interpreted/test_padding.py"
_DISPATCHED = "tests/interpreted/test_dispatched_calls.py"
_CONCURRENCY = "tests/test_concurrency.py"
_OPERATOR_FUZZ = "tests/test_operator_fuzz.py"

_KEY = "ninetoothed_patches/call_key.py"
_CACHE = "ninetoothed_patches/plan_cache.py"
_CALLS = "ninetoothed_patches/call_functions.py"
_ABI = "ninetoothed_patches/triton_abi.py"

# -- Launch plans: what is in a key, and what a call is compared by. --------------------

_LAUNCH_PLANS = (
    Mutation(
        name="enumerations-with-an-equality-of-their-own",
        file=_KEY,
        old=" and kind.__eq__ is int.__eq__",
        new="",
        promise="Two members that call themselves equal launch what each one's twin does.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-strides",
        file=_KEY,
        old='                layout += [f"{name}.stride()", f"{name}.dtype"]\n',
        new='                layout += [f"{name}.dtype"]\n',
        promise="The key holds the strides of every tensor.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-shape",
        file=_KEY,
        old='                outline.append(f"{name}.shape")\n',
        new='                outline.append(f"{name}.numel()")\n',
        promise="The key holds the shape of every tensor, not its number of elements.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-dtype",
        file=_KEY,
        old='f"{name}.dtype"]\n',
        new='f"{name}.element_size()"]\n',
        promise="The key holds the dtype of every tensor: float16 is not bfloat16.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-device",
        file=_KEY,
        old='                kinds.append(f"{name}.device")\n',
        new="",
        promise="The key holds the device of every tensor.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-alignment",
        file=_KEY,
        old='["__outline", "__alignments"]\n',
        new='["__outline", "0"]\n',
        promise="The key holds whether an address is aligned: Triton specialises on it.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="key-without-types-of-scalars",
        file=_KEY,
        old="""\
            kinds.append(f"__type({name})")

            if is_tensor:
""",
        new="""\
            if is_tensor:
                kinds.append(f"__type({name})")
""",
        promise="The key holds the type of every scalar: 1, 1.0 and True are three.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="zeros-share-a-key",
        file=_KEY,
        old="    if type(value) is float and not (value and value == value):\n",
        new="    if type(value) is float and value != value:\n",
        promise="The key holds the bits of a scalar: -0.0 is not 0.0.",
        tests=(_CALL_KEY,),
    ),
    Mutation(
        name="alignment-of-8",
        file=_KEY,
        old="ALIGNMENT = 16\n",
        new="ALIGNMENT = 8\n",
        promise="Aligned means by 16 bytes, as Triton takes it.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="subclasses-are-planned",
        file=_KEY,
        old="    if type(argument) in TENSOR_TYPES:\n        return None\n",
        new="    if isinstance(argument, torch.Tensor):\n        return None\n",
        promise="A call with a tensor subclass goes the ordinary way.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="guards-are-not-tried",
        file=_KEY,
        old="""\
    if not like(meta((4, 1), (1, 1))) or any(like(other) for other in others):
        return None
""",
        new="""\
    if not like(meta((4, 1), (1, 1))):
        return None
""",
        promise="PyTorch's private guards are used only where they tell apart what they must.",
        tests=(_CALL_KEY,),
    ),
    Mutation(
        name="one-misaligned-address-is-overlooked",
        file=_KEY,
        old='        any_address = " | ".join(',
        new='        any_address = " & ".join(',
        promise="One misaligned address among aligned ones is another call.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-the-other-zero",
        file=_KEY,
        old="{given} == {seen} and {given})",
        new="{given} == {seen})",
        promise="A recent plan for 0.0 is none for -0.0.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-another-type-of-scalar",
        file=_KEY,
        old="__type({given}) is __type({seen}) and ",
        new="",
        promise="A recent plan for 1 is none for True or 1.0.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-another-driver",
        file=_CALLS,
        old="                and __plan.driver is {driver}\n",
        new="",
        promise="A plan is launched by the driver it was made with.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-another-current-device",
        file=_CALLS,
        old="                and __plan.current_device() == __plan.device\n",
        new="",
        promise="A plan is launched while the device is current that it was made on.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-another-alignment",
        file=_CALLS,
        old="                and __plan.alignments == __alignments\n",
        new="",
        promise="A recent plan for aligned addresses is none for misaligned ones.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-for-another-state",
        file=_CALLS,
        old="                and __plan.state == {state}\n",
        new="",
        promise="What Triton reads on each call (hash, debug, knobs) decides on a plan.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-of-forgotten-kernels",
        file=_CALLS,
        old="                and __plan.store is {stores}[__plan.device]\n",
        new="",
        promise="When somebody clears Triton's kernels, their plans go too.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="recent-plan-past-a-hook",
        file=_CALLS,
        old="""\
                and not ({watchers})
            ):
                break
""",
        new="""\
            ):
                break
""",
        promise="A launch that a hook wants to see goes the ordinary way.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="traced-calls-enter-the-cache",
        file=_CALLS,
        old="    if __surplus or __is_dynamo_compiling():\n",
        new="    if __surplus:\n",
        promise="Dynamo traces through NineToothed's own launch function.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="traced-calls-are-not-counted",
        file=_CACHE,
        old="        count._dynamo_marked_constant = True\n",
        new="",
        promise="A call that Dynamo traces is counted, and traced as the unpatched one is.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="plan-of-a-cleared-tuner",
        file=_CALLS,
        old="""\
"and __len(__tuner.cache) == __cache.tuned" if tuner else "",
""",
        new='"",\n',
        promise="When the auto-tuner's results are cleared, it tunes again.",
        tests=(_TUNING,),
    ),
    Mutation(
        name="tuner-is-not-noticed",
        file=_CACHE,
        old="""\
        if self._tuner is not None and len(self._tuner.cache) != self.tuned:
            self._calling.run(self._notice_tuner)

""",
        new="",
        promise="When the auto-tuner's results are cleared, no plan by them is found.",
        tests=(_TUNING,),
    ),
    Mutation(
        name="tuner-is-not-noticed-before-a-call-without-a-plan",
        file=_CACHE,
        old="""\
        self._notice_tuner()

        try:
""",
        new="""\
        try:
""",
        promise="When the auto-tuner's results are cleared, a call that gets no plan does not hide it.",
        tests=(_TUNING,),
    ),
    Mutation(
        name="key-without-the-backends-rule",
        file=_CACHE,
        old="""\
        if rule is not None:
            layout += tuple(map(rule, self._reader.tensors_of(arguments)))

""",
        new="",
        promise="What else the backend specialises tensors on is in the key.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="kept-plan-of-forgotten-kernels",
        file=_CACHE,
        old="        if plan is not None and plan.store is not store:\n",
        new="        if plan is not None and plan.store is None:\n",
        promise="No plan is found by its key whose kernel Triton has forgotten.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="foreign-device-is-planned",
        file=_CACHE,
        old="            tensor.device != home for tensor",
        new="            tensor.device.type != home.type for tensor",
        promise="A call with tensors of another device than the current goes the ordinary way.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="unexpected-arguments-are-planned",
        file=_CACHE,
        old="            if bound.get(pointer) is not arguments[index]:\n",
        new="            if bound.get(pointer) is None:\n",
        promise="What the kernel was not given as it came in is not planned.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="plan-keeps-tensors",
        file=_CACHE,
        old="            bound[pointer] = None\n",
        new="",
        promise="A plan holds no tensor.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="captured-globals-are-planned",
        file=_CACHE,
        old="""\
        if triton_abi.captured_globals(self._kernel):
            return "captured globals"

""",
        new="",
        promise="A kernel that reads globals, which Triton compares on every call, has no plans.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="unloaded-kernel-is-planned",
        file=_CACHE,
        old="""\
        if compiled.function is None:
            return "not loaded"

""",
        new="",
        promise="A kernel that could not be loaded is not planned.",
        tests=(_TRITON_ABI,),
    ),
    Mutation(
        name="pre-hook-of-a-configuration-is-forgotten",
        file=_CACHE,
        old="""\
        if self._tuner is not None and triton_abi.winner_has_hook(self._tuner):
            return "configuration with a pre-hook"

""",
        new="",
        promise="A configuration's pre-hook runs before every launch.",
        tests=(_TUNING,),
    ),
    Mutation(
        name="one-plan-too-many",
        file=_CACHE,
        old="            while len(plans) >= self.bound:\n",
        new="            while len(plans) > self.bound:\n",
        promise="The cache is bounded by `max_plans`.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="first-plan-made-goes-first",
        file=_CACHE,
        old="        while queue[0][0] != queue[0][1].stamp:\n",
        new="        while queue[0][0] > queue[0][1].stamp:\n",
        promise="The plan that was used least recently goes first.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="eviction-during-a-capture",
        file=_CACHE,
        old="                if _is_capturing():\n",
        new="                if not plans:\n",
        promise="Nothing is evicted while a CUDA graph is captured.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="dropped-plan-is-launched",
        file=_CALLS,
        old="                and __plan.is_kept\n",
        new="",
        promise="A plan that was dropped launches nothing, although it is another plan's successor.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="dropped-plan-keeps-its-successors",
        file="ninetoothed_patches/launch_plan.py",
        old="""\
        self.is_kept = False
        # Else the plans that are dropped might keep each other, and all that were dropped before.
        self.successors = ()
""",
        new="""\
        self.is_kept = False
""",
        promise="What was evicted long ago is freed.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="dropped-plan-gets-successors",
        file=_CACHE,
        old="            if last.is_kept and plan not in last.successors:\n",
        new="            if plan not in last.successors:\n",
        promise="What was evicted long ago is freed, where what was used last was evicted, too.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="successors-of-one-plan-for-all",
        file=_CALLS,
        old="    __cache.last = __plan\n",
        new="",
        promise="Layouts in an order that comes again need no keys.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="evicted-plan-is-still-repeated",
        file=_CACHE,
        old="""\
        plan.drop()
        heapq.heappop(queue)
""",
        new="""\
        heapq.heappop(queue)
""",
        promise="A repeater launches nothing once its plan was evicted.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="plan-is-kept-before-it-is-queued",
        file=_CACHE,
        old="""\
            heapq.heappush(queue, (plan.stamp, plan))
            plans[plan.key] = plan
""",
        new="""\
            plans[plan.key] = plan
            heapq.heappush(queue, (plan.stamp, plan))
""",
        promise="A signal handler may raise while plans change: later calls do what they did.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="cleared-plans-are-still-launched",
        file=_CACHE,
        old="""\
            for plan in plans.values():
                plan.drop()
""",
        new="",
        promise="`clear_plans` drops all plans.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="forked-child-keeps-plans",
        file=_CACHE,
        old="os.register_at_fork(after_in_child=_after_fork_in_child)\n",
        new="",
        promise="A forked child makes plans, and locks, of its own.",
        tests=(_REPEATER, _HAZARDS),
    ),
    Mutation(
        name="call-within-which-plans-are-dropped-is-kept",
        file=_CACHE,
        old="        self._keep(Plan(key, store, launched), plans)\n",
        new="        self._keep(Plan(key, store, launched), self._plans)\n",
        promise="No plan is kept of a call within which plans were cleared, or a child was forked.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="first-plan-without-the-kernels-hash",
        file=_CACHE,
        old="        if state[0] is not self._kernel.hash:\n",
        new="        if self._kernel.hash is None:\n",
        promise="The first call's plan is found by the second.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="waiting-thread-prepares-again",
        file=_CACHE,
        old="        if self._made != made:\n",
        new="        if self._made < made:\n",
        promise="Two threads with the same call make one plan.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="repeater-of-a-dropped-plan",
        file=_CALLS,
        old="""\
                __plan.is_kept
                and {driver} is __driver
""",
        new="""\
                {driver} is __driver
""",
        promise="A repeater launches nothing once its plan was dropped.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="repeater-on-another-device",
        file=_CALLS,
        old="                and __current_device() == __device\n",
        new="",
        promise="A repeater launches nothing while another device is current.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="repeater-of-another-alignment",
        file=_CALLS,
        old="                and ({alignments}) == __alignments\n",
        new="",
        promise="A repeater launches nothing with addresses of another alignment.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="repeater-of-another-state",
        file=_CALLS,
        old="                and {state} == __state\n",
        new="",
        promise="A repeater launches nothing when Triton's state has changed.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="repeater-past-a-hook",
        file=_CALLS,
        old="""\
                and not ({watchers})
            )
""",
        new="""\
            )
""",
        promise="A repeater launches nothing while a hook is installed.",
        tests=(_REPEATER,),
    ),
    Mutation(
        name="first-candidate-of-the-tuner-is-planned",
        file="ninetoothed_patches/launch_plan.py",
        old="            asked = bound, size\n",
        new="            asked = asked or (bound, size)\n",
        promise="A plan of an auto-tuned kernel is the winner's, not a candidate's.",
        tests=(_TUNING,),
    ),
    Mutation(
        name="address-in-another-tensors-place",
        file="ninetoothed_patches/launch_plan.py",
        old='                f"address_{pointers.index(name)}"\n',
        new='                f"address_{pointers[::-1].index(name)}"\n',
        promise="Each address goes to the kernel's parameter of its tensor.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="scratch-memory-is-not-allocated",
        file=_ABI,
        old="""\
    if any(value for name, value in state.items() if name.endswith("scratch_size")):
        return None

""",
        new="",
        promise="A launcher that allocates scratch memory on each call is called itself.",
        tests=(_TRITON_ABI,),
    ),
    Mutation(
        name="every-launch-is-early",
        file=_ABI,
        old='    if is_dependent and "launch_pdl" in state:\n',
        new='    if "launch_pdl" in state:\n',
        promise="Only a kernel that waits itself is launched before the one in front of it has ended.",
        tests=(_DEPENDENT, "tests/test_launch_differential.py"),
    ),
    Mutation(
        name="ampere-is-said-to-launch-early",
        file=_ABI,
        old="        and target.arch == 90\n",
        new="        and target.arch >= 80\n",
        promise="No kernel waits by an instruction that a GPU has not.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="any-driver-captures-a-dependent-launch",
        file="ninetoothed_patches/dependent_launch.py",
        old="    return driver_version() >= _FIRST_CUDA_VERSION\n",
        new="    return True\n",
        promise="A launch is early only where a graph can have it.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="a-waiting-kernel-is-early-on-any-gpu",
        file="ninetoothed_patches/dependent_launch.py",
        old="        and triton_abi.has_dependent_launch(compiled.metadata.target)\n",
        new="",
        promise="A launch is early only where that was tried.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="interpreted-kernels-wait",
        file="ninetoothed_patches/dependent_launch.py",
        old="        or host_driver.interpreter_is_on()\n",
        new="",
        promise="Under the interpreter, which cannot wait, no kernel does.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="another-device-is-asked-for-dependent-launch",
        file="ninetoothed_patches/dependent_launch.py",
        old="torch.cuda.get_device_capability(device)",
        new="torch.cuda.get_device_capability(torch.device(device.type, 0))",
        promise="A kernel waits where its own device can.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="kernel-by-pieces-does-not-wait",
        file="ntops_ext/kernels/gated_rms_norm.py",
        old="""\
    \"\"\"The columns of a group are read piece by piece, twice.\"\"\"
    begin()
""",
        new="""\
    \"\"\"The columns of a group are read piece by piece, twice.\"\"\"
""",
        promise="Each kernel of an operator can be launched early.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="statistics-do-not-wait",
        file="ntops_ext/torch/_gated_rms_norm_backward.py",
        old="""\
                columns_per_piece=configs.STATISTICS_COLUMNS_PER_PIECE,
                waits=waits,
""",
        new="""\
                columns_per_piece=configs.STATISTICS_COLUMNS_PER_PIECE,
""",
        promise="Each kernel of an operator can be launched early.",
        tests=(_DEPENDENT,),
    ),
    Mutation(
        name="sanitizer-is-passed-over",
        file=_ABI,
        old='    if "launch" not in state or state.get("gsan_enabled"):\n',
        new='    if "launch" not in state:\n',
        promise="A launcher with a sanitizer's state is called itself.",
        tests=(_TRITON_ABI,),
    ),
    Mutation(
        name="pre-run-hooks-are-forgotten",
        file=_ABI,
        old='    watchers = ["__jit.pre_run_hooks"]\n',
        new="    watchers = []\n",
        promise="A kernel's pre-run hooks see every launch.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="exit-hooks-are-forgotten",
        file=_ABI,
        old='_LAUNCH_HOOKS = ("launch_enter_hook", "launch_exit_hook")\n',
        new='_LAUNCH_HOOKS = ("launch_enter_hook",)\n',
        promise="An exit hook alone sees every launch.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="debug-is-no-state",
        file=_ABI,
        old='        state.append("__runtime.debug")\n',
        new="",
        promise="With Triton's debug knob another kernel is launched.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="instrumentation-is-no-state",
        file=_ABI,
        old='        for knob in ("instrumentation_mode", "fpsan_homomorphic_casts"):\n',
        new='        for knob in ("fpsan_homomorphic_casts",):\n',
        promise="With Triton's instrumentation knob another kernel is launched.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="untried-triton-is-taken",
        file=_ABI,
        old="    return bool(match) and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST\n",
        new="    return bool(match) and OLDEST <= (int(match[1]), int(match[2]))\n",
        promise="A Triton that nobody has tried is refused.",
        tests=(_MATERIALIZER,),
    ),
    Mutation(
        name="applied-twice",
        file="ninetoothed_patches/materializer.py",
        old="""\
        if _original_call is None:
            _original_call = _install(max_plans)
""",
        new="""\
        _original_call = _install(max_plans)
""",
        promise="Applying twice is applying once, and `revert` restores NineToothed.",
        tests=(_MATERIALIZER,),
    ),
    Mutation(
        name="ahead-of-time-kernels-are-planned",
        file="ninetoothed_patches/materializer.py",
        old='        if self._caller != "torch":\n            return original(self)\n\n',
        new="",
        promise="A kernel for another caller than PyTorch is left alone.",
        tests=(_MATERIALIZER,),
    ),
    Mutation(
        name="jagged-calls-are-planned",
        file="ninetoothed_patches/materializer.py",
        old='    if {"offsets", "values"} & set(code.co_names):\n',
        new='    if {"offsets", "values"} & set(names):\n',
        promise="A call with jagged tensors goes the ordinary way.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="source-written-in-place",
        file="ninetoothed_patches/source_files.py",
        old="            unfinished.write_bytes(content)\n            os.replace(unfinished, path)\n",
        new="            path.write_bytes(content)\n",
        promise="A source appears whole: no process reads half of it.",
        tests=(_SOURCE_FILES + "::test_a_file_is_replaced_at_once",),
    ),
    Mutation(
        name="cancelled-compilation-is-planned",
        file="ninetoothed_patches/launch_plan.py",
        old="            self._launched = None if compiled is None else (*asked, compiled)\n",
        new="            self._launched = (*asked, compiled)\n",
        promise="A call whose compilation a hook cancels launches nothing, and raises nothing.",
        tests=(_HAZARDS,),
    ),
    Mutation(
        name="call-within-a-call-waits",
        file=_CACHE,
        old="    return is_held_here(_CHANGING) or is_in_a_call()\n",
        new="    return is_held_here(_CHANGING)\n",
        promise="A call that comes in the middle of another waits for no other thread.",
        tests=(_HAZARDS + "::test_calls_within_calls_wait_for_no_other_thread",),
    ),
    Mutation(
        name="call-within-a-change-waits",
        file=_CACHE,
        old="    return is_held_here(_CHANGING) or is_in_a_call()\n",
        new="    return is_in_a_call()\n",
        promise="A call that comes in the middle of a change waits for no other thread.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="call-within-a-tuning-shares-its-state",
        file=_CACHE,
        old="self._replace(copy.copy(self._tuner))",
        new="self._replace(self._tuner)",
        promise="A call that comes in the middle of a tuning leaves that as it is.",
        tests=(_HAZARDS + "::test_a_call_within_a_tuning",),
    ),
    Mutation(
        name="evicted-plans-are-freed-in-a-change",
        file=_CACHE,
        old="                dropped.append(self._evict(plans, queue))\n",
        new="                self._evict(plans, queue)\n",
        promise="What is dropped is freed while nothing is held.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="waiting-thread-adds-the-backends-rule-again",
        file=_CACHE,
        old="return self.call(call_key, arguments",
        new="return self.call(key[-1], arguments",
        promise="A call that has waited has the key of one that has not.",
        tests=(_PLAN_CACHE,),
    ),
    Mutation(
        name="arguments-that-are-not-known-are-true",
        file="ninetoothed_patches/launch_plan.py",
        old="""\
    def __bool__(self):
        raise TypeError(""",
        new="""\
    def is_true(self):
        raise TypeError(""",
        promise="A launcher that looks at the grid is called itself.",
        tests=(_TRITON_ABI,),
    ),
    Mutation(
        name="launcher-that-launches-twice-launches-once",
        file=_ABI,
        old="    return (launcher.launch, noted[0]) if len(noted) == 1 else None\n",
        new="    return (launcher.launch, noted[0]) if noted else None\n",
        promise="A launcher that does not launch exactly once is called itself.",
        tests=(_TRITON_ABI,),
    ),
    Mutation(
        name="offline-without-the-backends-rule",
        file=_ABI,
        old="    rule = _tensor_rule_of(backend) or _alignment\n",
        new="    rule = _alignment\n",
        promise="What is compiled offline is what a launch compiles, for an AMD GPU too.",
        tests=("tests/test_host_driver.py",),
    ),
    Mutation(
        name="forked-child-finds-a-lock-taken",
        file="ninetoothed_patches/locks.py",
        old="        os.register_at_fork(after_in_child=self._renew)\n",
        new="",
        promise="In a forked child no thread holds a lock.",
        tests=(
            _CONCURRENCY
            + "::test_a_child_forked_while_a_thread_holds_a_lock_is_not_stuck",
        ),
    ),
    Mutation(
        name="lock-of-the-child-is-given-back",
        file="ninetoothed_patches/locks.py",
        old="""\
        with self._lock:
            yield
""",
        new="""\
        self._lock.acquire()

        try:
            yield
        finally:
            self._lock.release()
""",
        promise="A thread that forks within a block leaves it in the child, too.",
        tests=(_CONCURRENCY + "::test_a_child_leaves_the_block_that_it_was_forked_in",),
    ),
    Mutation(
        name="child-keeps-a-stand-in",
        file="ninetoothed_patches/host_driver.py",
        old="os.register_at_fork(after_in_child=_withdraw_in_child)\n",
        new="",
        promise="What another thread had stand in is gone in a forked child.",
        tests=(
            _CONCURRENCY
            + "::test_a_child_forked_while_a_thread_holds_a_lock_is_not_stuck",
        ),
    ),
    Mutation(
        name="child-of-the-thread-within-loses-its-driver",
        file="ninetoothed_patches/host_driver.py",
        old="        and active.thread is not threading.current_thread()\n",
        new="",
        promise="The child of a thread within `stand_in` is within it.",
        tests=(_CONCURRENCY + "::test_a_child_of_the_thread_that_stands_in",),
    ),
    Mutation(
        name="every-error-is-about-the-cache",
        file="ninetoothed_patches/source_files.py",
        old="""\
    if not str(error.filename).startswith(folder):
        return error

""",
        new="",
        promise="An OSError that is not about Triton's cache stays what it is.",
        tests=(_SOURCE_FILES,),
    ),
)

# -- Prepared calls: their conditions. --------------------------------------------------

_PREPARED_CALLS = tuple(
    dataclasses.replace(
        mutation, file="ntops_ext/torch/_prepared.py", tests=(_PREPARED,)
    )
    for mutation in (
        Mutation(
            name="prepared-whatever-is-absent",
            file="",
            old="if argument is None\n        ]\n",
            new="if argument is None and name == 'out'\n        ]\n",
            promise="A call prepared without a gate is none with one.",
            tests=(),
        ),
        Mutation(
            name="prepared-past-gradients",
            file="",
            old="        if differentiable:\n",
            new="        if len(differentiable) > len(tensors):\n",
            promise="A prepared call loses no gradient.",
            tests=(),
        ),
        Mutation(
            name="prepared-past-tangents",
            file="",
            old='        conditions.append("__forward_ad._current_level < 0")\n',
            new="",
            promise="A prepared call loses no tangent.",
            tests=(),
        ),
        Mutation(
            name="prepared-past-inference-mode",
            file="",
            old="        if written:\n",
            new="        if written and allocated is not None:\n",
            promise="A prepared call counts a version of each tensor that has one.",
            tests=(),
        ),
        Mutation(
            name="prepared-for-unchecked-addresses",
            file="",
            old="        if checked is not None:\n",
            new="        if checked is not None and not checked.verdict:\n",
            promise="A prepared call with new addresses is checked for overlap.",
            tests=(),
        ),
        Mutation(
            name="prepared-for-any-other-addresses",
            file="",
            old="        if not ({lie_alike}):\n            return None\n",
            new="",
            promise="A prepared call with new addresses is compared with one that was checked.",
            tests=(),
        ),
        Mutation(
            name="prepared-new-addresses-go-the-whole-way",
            file="",
            old='    return " and ".join(relations) or "True", names\n',
            new='    return "False", names\n',
            promise="Tensors at new addresses, but apart as before, are prepared for.",
            tests=(),
        ),
        Mutation(
            name="prepared-apart-on-one-side",
            file="",
            old=' or {there} + __span_{second} <= {here})"\n',
            new=' or {there} <= {here})"\n',
            promise="Tensors lie apart only if the first of them ends before the other begins.",
            tests=(),
        ),
        Mutation(
            name="prepared-at-another-distance",
            file="",
            old='f"{there} - {here} == {distance}"',
            new='f"{there} - {here} >= {distance}"',
            promise="Tensors that interleave do so at the distance that was checked.",
            tests=(),
        ),
        Mutation(
            name="prepared-past-others-that-are-written",
            file="",
            old="            if second in written[: position + 1]:\n",
            new="            if second in written:\n",
            promise="Tensors that are written are compared with each other, too.",
            tests=(),
        ),
        Mutation(
            name="prepared-call-counts-no-version",
            file="",
            old="        if counted:\n",
            new="        if counted and allocated is not None:\n",
            promise="Autograd notices what a prepared call has written.",
            tests=(),
        ),
        Mutation(
            name="prepared-views-without-offset",
            file="",
            old='    return f"{address} + {offset}" if offset else address\n',
            new="    return address\n",
            promise="A view of an argument is launched at its own address.",
            tests=(),
        ),
    )
) + (
    Mutation(
        name="first-launch-of-many-is-prepared",
        file="ntops_ext/torch/_gated_rms_norm.py",
        old="        if len(launches) == 1:\n            _prepare(",
        new="        if launches:\n            _prepare(",
        promise="A call of several launches is not prepared as its first one.",
        tests=(_PREPARED + "::test_a_call_of_several_launches_is_not_prepared",),
    ),
)

# -- Checks, layouts, and how calls are cut. --------------------------------------------

_ARGUMENTS = (
    Mutation(
        name="touching-strides-are-let-through",
        file="ntops_ext/torch/_checks.py",
        old="        if stride <= extent:\n",
        new="        if stride < extent:\n",
        promise="An output two elements of which share memory is refused.",
        tests=(_CHECKS,),
    ),
    Mutation(
        name="last-element-does-not-overlap",
        file="ntops_ext/torch/_checks.py",
        old="    return start, start + (last + 1) * tensor.element_size()\n",
        new="    return start, start + last * tensor.element_size()\n",
        promise="An overlap by one element is an overlap.",
        tests=(_CHECKS,),
    ),
    Mutation(
        name="transposed-view-is-the-same",
        file="ntops_ext/torch/_checks.py",
        old="            if size > 1\n        )\n    )\n",
        new="            if size < 1\n        )\n    )\n",
        promise="In place means the same elements in the same order.",
        tests=(_CHECKS,),
    ),
    Mutation(
        name="infinite-eps",
        file="ntops_ext/torch/_checks.py",
        old="    if type(eps) is float and 0.0 <= eps < math.inf:\n",
        new="    if type(eps) is float and 0.0 <= eps:\n",
        promise="An `eps` that is not finite is refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="true-is-a-number",
        file="ntops_ext/torch/_checks.py",
        old="    if not isinstance(value, numbers.Real) or isinstance(value, NO_NUMBERS):\n",
        new="    if not isinstance(value, numbers.Real):\n",
        promise="A bool is no number.",
        tests=(_CHECKS, _GATED),
    ),
    Mutation(
        name="layouts-without-strides",
        file="ntops_ext/torch/_layouts.py",
        old="                *map(torch.Tensor.stride, tensors),\n",
        new="",
        promise="What was found out about a layout is not used for other strides.",
        tests=(_ROPE, _GATED_KERNEL + "::test_a_layout_changes_no_bit"),
    ),
    Mutation(
        name="layouts-without-dtype",
        file="ntops_ext/torch/_layouts.py",
        old='_describe = operator.attrgetter("shape", "dtype", "device", "layout")\n',
        new='_describe = operator.attrgetter("shape", "device", "layout")\n',
        promise="What was found out about a layout is not used for other dtypes.",
        tests=(_ROPE, _GATED),
    ),
    Mutation(
        name="layouts-without-device",
        file="ntops_ext/torch/_layouts.py",
        old='_describe = operator.attrgetter("shape", "dtype", "device", "layout")\n',
        new='_describe = operator.attrgetter("shape", "dtype", "layout")\n',
        promise="What was found out about a layout is not used on other devices.",
        tests=(_ROPE, _GATED),
    ),
    Mutation(
        name="unsigned-offsets-of-rows",
        file="ntops_ext/torch/_rows.py",
        old="MAX_OFFSET = 2**31 - 1\n",
        new="MAX_OFFSET = 2**32 - 1\n",
        promise="No offset of a launch is beyond what 32 bits with a sign hold.",
        tests=(_ROWS,),
    ),
    Mutation(
        name="rows-merged-by-one-tensor",
        file="ntops_ext/torch/_rows.py",
        old="        if sizes and all(\n",
        new="        if sizes and any(\n",
        promise="Row dimensions become one only where every tensor's strides allow it.",
        tests=(_ROWS,),
    ),
    Mutation(
        name="odd-row-is-lost",
        file="ntops_ext/torch/_rows.py",
        old="    for start, length in ((0, half), (half, shape[widest] - half)):\n",
        new="    for start, length in ((0, half), (half, half)):\n",
        promise="A call that is cut computes every row.",
        tests=(_ROWS,),
    ),
    Mutation(
        name="views-from-the-start-of-storage",
        file="ntops_ext/torch/_rows.py",
        old="            self.shape, self.strides, tensor.storage_offset() + self.offset\n",
        new="            self.shape, self.strides, self.offset\n",
        promise="A slice of a storage is read where it begins.",
        tests=(_ROWS, _GATED_KERNEL + "::test_a_layout_changes_no_bit"),
    ),
    Mutation(
        name="unsigned-offsets-of-chunks",
        file="ntops_ext/torch/_chunks.py",
        old="from ntops_ext.torch._rows import MAX_OFFSET\n",
        new="MAX_OFFSET = 2**32 - 1\n",
        promise="No offset of a launch is beyond what 32 bits with a sign hold.",
        tests=(_CHUNKS,),
    ),
    Mutation(
        name="chunks-without-the-width-of-a-row",
        file="ntops_ext/torch/_chunks.py",
        old="        max(tensor.num_rows - 1, 0) * tensor.row_stride + tensor.row_extent\n",
        new="        max(tensor.num_rows - 1, 0) * tensor.row_stride\n",
        promise="The last element of a chunk's last row fits 32 bits.",
        tests=(_CHUNKS,),
    ),
    Mutation(
        name="chunks-without-the-rows-of-an-entry",
        file="ntops_ext/torch/_chunks.py",
        old="            (max_offset - last_row) // tensor.batch_stride + 1\n",
        new="            max_offset // tensor.batch_stride + 1\n",
        promise="The last row of a chunk's last batch entry fits 32 bits.",
        tests=(_CHUNKS,),
    ),
    Mutation(
        name="strided-heads-are-taken-for-dense",
        file="ntops_ext/torch/_heads.py",
        old="    if stride != 1 or (num_heads > 1 and head_stride != head_dim):\n",
        new="    if stride != 1:\n",
        promise="Heads of a token that do not follow one another are refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="odd-heads",
        file="ntops_ext/torch/_heads.py",
        old="    if head_dim == 0 or head_dim % 2:\n",
        new="    if head_dim == 0:\n",
        promise="Heads that cannot be cut into pairs are refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="strided-table",
        file="ntops_ext/torch/_heads.py",
        old="    if rope.shape[1] > 1 and rope.numel() and rope.stride(1) != 1:\n",
        new="    if rope.shape[1] > 1 and rope.numel() and rope.stride(1) < 1:\n",
        promise="A table without dense rows is refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="table-rows-in-complex-elements",
        file="ntops_ext/torch/_heads.py",
        old="        2 * rope.stride(0) if rope.shape[0] > 1 else 0,\n",
        new="        rope.stride(0) if rope.shape[0] > 1 else 0,\n",
        promise="Offsets into the table's real view fit 32 bits.",
        tests=(_CHUNKS,),
    ),
    Mutation(
        name="lazy-conjugate",
        file="ntops_ext/torch/_qk_norm_rope_pack.py",
        old="    if rope.is_conj() or any(map(torch.Tensor.is_neg, tensors)):\n",
        new="    if any(map(torch.Tensor.is_neg, tensors)):\n",
        promise="A lazily conjugated table is refused, not read as it lies.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="addresses-are-bounded-a-layout",
        file="ntops_ext/torch/_layouts.py",
        old="        if len(self._found) >= _MAX_ADDRESSES:\n",
        new="        if len(found) >= _MAX_ADDRESSES:\n",
        promise="The addresses of all layouts together are bounded.",
        tests=(_ROPE + "::test_addresses_are_bounded_over_all_layouts",),
    ),
    Mutation(
        name="addresses-are-not-forgotten",
        file="ntops_ext/torch/_layouts.py",
        old="""\
        for found in self._found:
            found.clear()

""",
        new="",
        promise="Too many addresses are forgotten.",
        tests=(_ROPE + "::test_addresses_are_bounded_over_all_layouts",),
    ),
    Mutation(
        name="addresses-are-not-counted",
        file="ntops_ext/torch/_layouts.py",
        old="        self._found.append(found)\n",
        new="",
        promise="Every address that is remembered is counted.",
        tests=(_ROPE + "::test_addresses_are_bounded_over_all_layouts",),
    ),
    Mutation(
        name="inference-tensors-are-saved",
        file="ntops_ext/torch/_layouts.py",
        old="        if argument is not None and argument.is_inference():\n",
        new="""\
        if argument is not None and argument.is_inference() and not names:
""",
        promise="What cannot be saved for a backward pass is refused by name.",
        tests=(
            _OPERATOR_FUZZ
            + "::test_what_cannot_be_saved_for_a_backward_pass_is_refused_by_name",
        ),
    ),
    Mutation(
        name="out-of-inference-mode",
        file="ntops_ext/torch/_layouts.py",
        old="""\
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
""",
        new="        if tensor.is_inference() and not names:\n",
        promise="An `out` that PyTorch will not write is refused by name.",
        tests=(_OPERATOR_FUZZ + "::test_an_out_of_inference_mode_is_refused_by_name",),
    ),
    Mutation(
        name="nested-is-dense",
        file="ntops_ext/torch/_checks.py",
        old="    if value.is_nested:\n",
        new="    if value.is_nested and not value.is_leaf:\n",
        promise="A nested tensor is refused by name.",
        tests=(_OPERATOR_FUZZ + "::test_a_nested_tensor_is_refused_by_name",),
    ),
    Mutation(
        name="lazy-parameters-have-shapes",
        file="ntops_ext/torch/_checks.py",
        old="""\
    if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
""",
        new="    if isinstance(value, torch.nn.modules.lazy.LazyModuleMixin):\n",
        promise="A parameter without a shape is refused by name.",
        tests=(
            _OPERATOR_FUZZ + "::test_a_parameter_of_a_lazy_module_is_refused_by_name",
        ),
    ),
    Mutation(
        name="empty-tensors-are-copied",
        file="ntops_ext/torch/_rows.py",
        old="        not tensor.numel() or (tensor",
        new="        (tensor",
        promise="The strides of an empty tensor mean nothing.",
        tests=(_GATED_KERNEL + "::test_the_strides_of_no_elements_mean_nothing",),
    ),
    Mutation(
        name="rows-of-a-program-reach-past-32-bits",
        file="ntops_ext/torch/_rows.py",
        old="        if row_stride * rows_of_a_program > MAX_OFFSET:\n",
        new="        if row_stride > MAX_OFFSET:\n",
        promise="No kernel multiplies a stride that is compiled in past 32 bits.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_rows_far_apart",),
    ),
    Mutation(
        name="heads-wider-than-a-kernel-holds",
        file="ntops_ext/torch/_heads.py",
        old="    if head_dim > MAX_HEAD_DIM:\n",
        new="    if head_dim > 2 * MAX_HEAD_DIM:\n",
        promise="Heads that no kernel can hold are refused by name.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="sizes-of-a-trace-are-remembered",
        file="ntops_ext/torch/_launch.py",
        old="    if not is_kernel and not writes and not any(map(_has_unknown_sizes, tensors)):\n",
        new="    if not is_kernel and not writes:\n",
        promise="A call with symbolic sizes is traced, on a CPU too.",
        tests=(_COMPILED + "::test_a_symbolic_trace_outside_of_torch_compile",),
    ),
    Mutation(
        name="guards-see-nested-tensors",
        file="ninetoothed_patches/call_functions.py",
        old="        for __plan in () if {any_is_nested} else __cache.last.successors:\n",
        new="        for __plan in __cache.last.successors:\n",
        promise="A nested tensor raises the twin's error, and does not end the process.",
        tests=(_HAZARDS + "::test_nested_tensors_raise_the_twins_error",),
    ),
    Mutation(
        name="a-lock-for-each-handle-of-a-tuner",
        file="ninetoothed_patches/plan_cache.py",
        old="        self._calling = _call_lock(self._tuner)\n",
        new="        self._calling = CallLock()\n",
        promise="Two handles of one auto-tuned kernel may be called by two threads.",
        tests=(
            _TUNING + "::test_threads_that_tune_by_two_handles_do_not_break_each_other",
        ),
    ),
    Mutation(
        name="one-column-too-many",
        file="ntops_ext/torch/_rows.py",
        old="MAX_COLUMNS = MAX_OFFSET\n",
        new="MAX_COLUMNS = MAX_OFFSET + 1\n",
        promise="A row whose offsets pass 32 bits is refused.",
        tests=(
            _OPERATOR_FUZZ
            + "::test_rows_whose_offsets_pass_32_bits_are_refused_by_name",
        ),
    ),
    Mutation(
        name="columns-by-a-narrow-group-size",
        file="ntops_ext/torch/_gated_rms_norm.py",
        old="num_columns % int(group_size) != 0:\n",
        new="num_columns % group_size != 0:\n",
        promise="A group size of any integer type is taken.",
        tests=(
            _OPERATOR_FUZZ
            + "::test_a_group_size_may_be_narrower_than_the_number_of_columns",
        ),
    ),
    Mutation(
        name="wrappers-reach-the-kernel",
        file="ntops_ext/torch/_launch.py",
        old="        or _has_dispatch_of_its_own(tensors)\n",
        new="",
        promise="A tensor without memory of its own reaches no kernel.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="modes-do-not-see-the-operator",
        file="ntops_ext/torch/_launch.py",
        old="        or torch._C._len_torch_dispatch_stack() > 0\n",
        new="",
        promise="A mode sees a call before its kernel runs.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="gradients-of-gated-rms-norm-are-not-dispatched",
        file="ntops_ext/torch/_gated_rms_norm_backward.py",
        old='_launch.dispatched("gated_rms_norm_backward", given, False)',
        new="None",
        promise="No kernel gets an incoming gradient that has no memory; a mode sees a backward pass.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="gradients-of-qk-norm-rope-are-not-dispatched",
        file="ntops_ext/torch/_qk_norm_rope_backward.py",
        old="    if as_operator is not None:\n",
        new="    if False:\n",
        promise="No kernel gets an incoming gradient that has no memory; a mode sees a backward pass.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="saved-parameters-of-another-width",
        file="ntops_ext/torch/_gated_rms_norm_backward.py",
        old='        parameters=(("weight", weight), ("bias", bias)),\n',
        new="        parameters=(),\n",
        promise="No kernel reads behind a tensor that a hook has made shorter.",
        tests=(
            _GATED_BACKWARD_KERNEL
            + "::test_what_a_hook_makes_of_saved_tensors_is_checked",
        ),
    ),
    Mutation(
        name="saved-negatives-are-taken-for-their-positives",
        file="ntops_ext/torch/_gated_rms_norm_backward.py",
        old="    if any(map(torch.Tensor.is_neg, tensors)):\n",
        new="    if False:\n",
        promise="A saved tensor that a hook has negated lazily is refused by name.",
        tests=(
            _GATED_BACKWARD_KERNEL
            + "::test_what_a_hook_makes_of_saved_tensors_is_checked",
        ),
    ),
    Mutation(
        name="threads-share-the-interpreter",
        file="ntops_ext/torch/_launch.py",
        old="    with _INTERPRETER.held():\n",
        new="    if True:\n",
        promise="Threads may call operators whose kernels are interpreted.",
        tests=(
            "tests/interpreted/test_interpreter_threads.py::test_threads_take_turns",
        ),
    ),
    Mutation(
        name="the-interpreter-loses-its-place",
        file="ntops_ext/torch/_launch.py",
        old="            state.update(before)\n",
        new="            pass\n",
        promise="A call in the midst of an interpreted kernel leaves that one its programs.",
        tests=(
            "tests/interpreted/test_interpreter_threads.py::test_a_call_in_the_midst_of_another",
        ),
    ),
    Mutation(
        name="jit-traces-do-not-see-the-operator",
        file="ntops_ext/torch/_launch.py",
        old="        or torch._C._is_tracing()\n",
        new="",
        promise="`torch.jit.trace` records the operator, not what its kernel left behind.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="tangents-reach-the-operator",
        file="ntops_ext/torch/_launch.py",
        old="    if _layouts.is_in_forward_mode() and",
        new="    if False and",
        promise="Tangents are refused by name where a mode sees the call.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="operators-look-for-tangents-below-autograd",
        file="ntops_ext/torch/_custom_ops.py",
        old="with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):",
        new="with torch.no_grad():",
        promise="In a level of forward mode a mode changes no call without tangents.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="transforms-do-not-see-the-operator",
        file="ntops_ext/torch/_launch.py",
        old="        is_transformed\n        or",
        new="        False\n        or",
        promise="A transform of `torch.func` sees a call before its kernel runs.",
        tests=(_DISPATCHED,),
    ),
    Mutation(
        name="gradients-of-pairs-at-odd-offsets",
        file="ntops_ext/torch/_qk_norm_rope.py",
        old="""\
    return gradient.clone() if any(step % 2 for step in steps) else gradient
""",
        new="""\
    return gradient.clone() if any(step < 0 for step in steps) else gradient
""",
        promise="An incoming gradient may lie at any offset.",
        tests=(_OPERATOR_FUZZ + "::test_a_gradient_at_an_odd_offset_is_taken",),
    ),
    Mutation(
        name="rounding-in-the-default-dtype",
        file="ntops_ext/torch/_eager.py",
        old='        "dtype": torch.float32,\n',
        new="",
        promise="What PyTorch rounds like is found out whatever the default dtype is.",
        tests=(_EAGER_ROUNDING,),
    ),
)

# -- Kernels: every rounding, every mask, what is added in which order. -----------------

_HEADS = "ntops_ext/kernels/_heads.py"
_PACK = "ntops_ext/kernels/qk_norm_rope_pack.py"
_ROPE_GRADIENTS = "ntops_ext/kernels/qk_norm_rope_backward.py"
_NORM = "ntops_ext/kernels/gated_rms_norm.py"
_NORM_GRADIENTS = "ntops_ext/kernels/gated_rms_norm_backward.py"
_SUM = "ntops_ext/kernels/sum_of_rows.py"

_KERNELS = (
    Mutation(
        name="rope-eps-outside-the-root",
        file=_HEADS,
        old="    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, 0.0) + eps)\n",
        new="    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, 0.0)) + eps\n",
        promise="`eps` is added inside the root.",
        tests=(
            _ROPE_KERNEL + "::test_special_values",
            _ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",
        ),
    ),
    Mutation(
        name="rope-mean-contracted-with-eps",
        file=_HEADS,
        old="    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, 0.0) + eps)\n",
        new="    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, eps))\n",
        promise="The mean is rounded before `eps` is added, as PyTorch's is.",
        tests=(
            _ROPE_KERNEL + "::test_squares_are_added_in_the_order_that_was_asked_for",
        ),
    ),
    Mutation(
        name="rope-normalized-is-not-rounded",
        file=_HEADS,
        old="    normalized = ntl.cast(wide * scale, heads.dtype)\n",
        new="    normalized = wide * scale\n",
        promise="A normalised head is rounded to its dtype, as PyTorch rounds it.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="rope-weighted-is-not-rounded",
        file=_HEADS,
        old="""\
    weighted = ntl.cast(
        ntl.cast(normalized, ntl.float32) * ntl.cast(weight_row, ntl.float32),
        heads.dtype,
    )
""",
        new="""\
    weighted = ntl.cast(normalized, ntl.float32) * ntl.cast(weight_row, ntl.float32)
""",
        promise="A weighted head is rounded to its dtype, as PyTorch rounds it.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="rope-rotates-in-the-narrow-dtype",
        file=_HEADS,
        old="""\
    real = ntl.cast(narrow_real, ntl.float32)
    imaginary = ntl.cast(narrow_imaginary, ntl.float32)
""",
        new="""\
    real = narrow_real
    imaginary = narrow_imaginary
    cosine = ntl.cast(cosine, heads.dtype)
    sine = ntl.cast(sine, heads.dtype)
""",
        promise="Heads are rotated in float32, by a float32 table.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="rope-products-swapped",
        file=_HEADS,
        old="    return ntl.fma(imaginary, sine * -1.0, real * cosine)\n",
        new="    return ntl.fma(real, cosine, imaginary * (sine * -1.0))\n",
        promise="The product that is named is the one that is not rounded.",
        tests=(_ROPE_KERNEL + "::test_products_are_rounded_as_was_asked_for",),
    ),
    Mutation(
        name="rope-squares-are-not-rounded",
        file=_HEADS,
        old="    return ntl.fma(values, values, 0.0)\n",
        new="    return values * values\n",
        promise="A float32 square is rounded before it is added.",
        tests=(_ROPE_OFFLINE + "::test_nothing_depends_on_the_default_of_fp_fusion",),
    ),
    Mutation(
        name="rope-four-squares-by-pairs",
        file=_HEADS,
        old="    return ((first + second) + third) + fourth\n",
        new="    return (first + second) + (third + fourth)\n",
        promise="Squares are added in the order that was asked for.",
        tests=(
            _ROPE_KERNEL + "::test_squares_are_added_in_the_order_that_was_asked_for",
        ),
    ),
    Mutation(
        name="rope-lanes-by-decreasing-distance",
        file=_HEADS,
        old="""\
                    remaining, (remaining.shape[0], remaining.shape[1] // 2, 2)
                ),
                2,
""",
        new="""\
                    remaining, (remaining.shape[0], 2, remaining.shape[1] // 2)
                ),
                1,
""",
        promise="Lanes are added in the order that was asked for.",
        tests=(
            _ROPE_KERNEL + "::test_squares_are_added_in_the_order_that_was_asked_for",
        ),
    ),
    Mutation(
        name="rope-padding-is-not-zero",
        file=_HEADS,
        old="        other=0 if is_padded else None,\n",
        new="        other=None,\n",
        promise="The columns that pad a head enter the sum of squares as zeros.",
        tests=(_PADDING + "::test_qk_norm_rope_pack",),
    ),
    Mutation(
        name="rope-absent-heads-are-not-padded",
        file=_HEADS,
        old="        absent_heads = grid[2] * num_heads - tensor.shape[2]\n",
        new="        absent_heads = 0\n",
        promise="Heads beyond the last are neither read nor written.",
        tests=(_ROPE_KERNEL + "::test_every_head_has_a_program",),
    ),
    Mutation(
        name="pack-prefix-is-one-row-longer",
        file=_PACK,
        old="""\
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src, eps
):
    begin()
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
""",
        new="""\
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src, eps
):
    begin()
    if k_prefix.offsets(1) <= k_prefix.source.shape[1]:
""",
        promise="Rows [0, P) are the prefix, and no more.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="pack-k-by-the-weight-of-q",
        file=_PACK,
        old="""\
        k_heads = k_out
        table = rope
        q_weights = q_weight
        k_weights = k_weight
""",
        new="""\
        k_heads = k_out
        table = rope
        q_weights = q_weight
        k_weights = q_weight
""",
        promise="K is scaled by its own weight.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="pack-v-from-its-own-rows",
        file=_PACK,
        old="""\
        k_heads = k_out
        v_heads = v_src
""",
        new="""\
        k_heads = k_out
        v_heads = v_out
""",
        promise="V comes from `v_src` where there is one.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="pack-table-from-the-first-packed-row",
        file=_PACK,
        old="        (_heads.table_tensor(tokens, head_dim, dtype), behind),\n",
        new="        (_heads.table_tensor(tokens, head_dim, dtype), in_front),\n",
        promise="The table's first row belongs to the first token behind the prefix.",
        tests=(_ROPE_KERNEL + "::test_every_bit_is_that_of_the_written_out_steps",),
    ),
    Mutation(
        name="pack-k-in-the-order-of-q",
        file=_PACK,
        old="        normalize_and_rotate_k=normalize_and_rotate(k_order),\n",
        new="        normalize_and_rotate_k=normalize_and_rotate(q_order),\n",
        promise="The squares of K are added in K's order.",
        tests=(_ROPE_KERNEL + "::test_q_and_k_may_be_added_in_different_orders",),
    ),
    Mutation(
        name="pack-blocks-of-q-alone",
        file=_PACK,
        old="""\
    num_blocks = max(
        -(-num_heads // heads_per_program), -(-num_kv_heads // kv_heads_per_program)
    )
""",
        new="    num_blocks = -(-num_heads // heads_per_program)\n",
        promise="Every head of K and V has a program.",
        tests=(_ROPE_KERNEL + "::test_every_head_has_a_program",),
    ),
    Mutation(
        name="rope-gradient-turned-forwards",
        file=_ROPE_GRADIENTS,
        old="    turned_imaginary = ntl.fma(grad_imaginary, cosine, grad_real * (sine * -1.0))\n",
        new="    turned_imaginary = ntl.fma(grad_imaginary, cosine, grad_real * sine)\n",
        promise="A gradient is turned back, by the table's conjugate.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_gradients_are_those_of_the_definition",),
    ),
    Mutation(
        name="rope-gradient-of-absent-heads",
        file=_ROPE_GRADIENTS,
        old="""\
        scale = ntl.where(is_present[:, None], ntl.rsqrt(mean_square + eps), 0.0)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)

    total""",
        new="""\
        scale = ntl.rsqrt(mean_square + eps)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)

    total""",
        promise="What pads a program adds nothing to the gradient of the weight, NaN neither.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_each_alone_has_the_bits_of_both",),
    ),
    Mutation(
        name="rope-gradient-of-absent-tokens",
        file=_ROPE_GRADIENTS,
        old="""\
        is_present = (input[token].offsets(1) < input.source.shape[1]) & (
            input[token].offsets(2) < input.source.shape[2]
        )
        squares = _group_terms(ntl.fma(heads, heads, 0.0))
        sum_of_squares = _add_lanes(squares)
        mean_square = ntl.fma(sum_of_squares, 1.0 / input.source.shape[3], 0.0)
        scale = ntl.where(is_present[:, None], ntl.rsqrt(mean_square + eps), 0.0)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)
        weighted""",
        new="""\
        is_present = input[token].offsets(2) < input.source.shape[2]
        squares = _group_terms(ntl.fma(heads, heads, 0.0))
        sum_of_squares = _add_lanes(squares)
        mean_square = ntl.fma(sum_of_squares, 1.0 / input.source.shape[3], 0.0)
        scale = ntl.where(is_present[:, None], ntl.rsqrt(mean_square + eps), 0.0)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)
        weighted""",
        promise="Tokens behind the last add nothing to the gradient of the weight, NaN neither.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_what_pads_a_program_adds_nothing",),
    ),
    Mutation(
        name="rope-gradient-without-its-mean",
        file=_ROPE_GRADIENTS,
        old="""\
        across = ntl.fma(normalized, mean_product, weighted)
        grad_input[token] = ntl.cast(across * scale, input.dtype.dtype)

    total""",
        new="""\
        across = weighted
        grad_input[token] = ntl.cast(across * scale, input.dtype.dtype)

    total""",
        promise="The gradient of a head is orthogonal to the head.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_gradients_are_those_of_the_definition",),
    ),
    Mutation(
        name="rope-gradient-padding-is-not-zero",
        file=_ROPE_GRADIENTS,
        old='    input = Tensor(shape=heads_shape, dtype=dtype, other=0, name="input")\n',
        new='    input = Tensor(shape=heads_shape, dtype=dtype, name="input")\n',
        promise="What pads a block of heads is read as zeros.",
        tests=(_PADDING + "::test_gradients_of_qk_norm_rope",),
    ),
    Mutation(
        name="norm-eps-outside-the-root",
        file=_NORM,
        old="""\
    held_mean = ntl.fma(held_total, inverse_group_size, eps)
    held_scale = _inverse_root(held_mean, output.dtype == ntl.float32)
""",
        new="""\
    held_mean = held_total * inverse_group_size
    held_scale = _inverse_root(held_mean, output.dtype == ntl.float32) + eps
""",
        promise="`eps` is added inside the root.",
        tests=(_GATED_KERNEL + "::test_eps_is_inside_the_root",),
    ),
    Mutation(
        name="norm-in-the-narrow-dtype",
        file=_NORM,
        old="    held = ntl.cast(input_loaded, ntl.float32)\n",
        new="    held = input_loaded\n",
        promise="All arithmetic is in float32.",
        tests=(_GATED_KERNEL + "::test_every_mode_is_rounded_once",),
    ),
    Mutation(
        name="norm-gate-in-the-narrow-dtype",
        file=_NORM,
        old="        held_gate = ntl.cast(gate, ntl.float32)\n",
        new="        held_gate = ntl.cast(ntl.cast(gate, output.dtype), ntl.float32)\n",
        promise="A float32 gate of a 16-bit input is not rounded.",
        tests=(
            _GATED_KERNEL + "::test_each_tensor_may_have_its_own_dtype",
            _GATED_KERNEL + "::test_a_wide_call_of_three_dimensions_with_mixed_dtypes",
        ),
    ),
    Mutation(
        name="norm-rounds-before-the-gate",
        file=_NORM,
        old="    held_result = ntl.fma(held * held_scale, held_weight, held_bias)\n",
        new="""\
    held_result = ntl.fma(held * held_scale, held_weight, held_bias)
    held_result = ntl.cast(ntl.cast(held_result, output.dtype), ntl.float32)
""",
        promise="A result is rounded once, after the gate.",
        tests=(_GATED_KERNEL + "::test_every_mode_is_rounded_once",),
    ),
    Mutation(
        name="norm-offset-in-the-weights-dtype",
        file=_NORM,
        old="        held_weight = weight_offset + ntl.cast(first_weight, ntl.float32)\n",
        new="""\
        held_weight = ntl.cast(
            ntl.cast(
                weight_offset + ntl.cast(first_weight, ntl.float32), first_weight.dtype
            ),
            ntl.float32,
        )
""",
        promise="`weight_offset` is added in float32.",
        tests=(_GATED_KERNEL + "::test_the_weight_offset_is_added_in_float32",),
    ),
    Mutation(
        name="norm-squares-are-contracted",
        file=_NORM,
        old="    held_total = _sum_of_columns(ntl.fma(held, held, 0.0), False)\n",
        new="    held_total = _sum_of_columns(held * held, False)\n",
        promise="No sum of a product is left to the compiler.",
        tests=(_GATED_OFFLINE + "::test_no_sum_of_a_product_is_left_to_the_compiler",),
    ),
    Mutation(
        name="norm-input-padding-is-not-zero",
        file=_NORM,
        old='        rows("input", input_dtype, other=0),\n',
        new='        rows("input", input_dtype),\n',
        promise="Lanes behind the last column enter the sum of squares as zeros.",
        tests=(_PADDING + "::test_gated_rms_norm",),
    ),
    Mutation(
        name="norm-gate-padding-is-not-zero",
        file=_NORM,
        old='        rows("gate", gate_dtype, other=0) if gate else scalar("gate"),\n',
        new='        rows("gate", gate_dtype) if gate else scalar("gate"),\n',
        promise="Where the gate comes first, its lanes behind the last column are zeros.",
        tests=(_PADDING + "::test_gated_rms_norm",),
    ),
    Mutation(
        name="norm-inverse-root-of-the-gpu",
        file=_NORM,
        old="        inverse_root = ntl.div_rn(1.0, ntl.sqrt_rn(mean_square))\n",
        new="        inverse_root = ntl.rsqrt(mean_square)\n",
        promise="In float32 the inverse root is rounded correctly.",
        tests=(
            _GATED_OFFLINE + "::test_float32_divides_and_takes_roots_with_rounding",
        ),
    ),
    Mutation(
        name="norm-approximate-division",
        file=_NORM,
        old="        gated = ntl.div_rn(ungated, factor_or_divisor)\n",
        new="        gated = ungated / factor_or_divisor\n",
        promise="In float32 a sigmoid's division is rounded correctly.",
        tests=(
            _GATED_OFFLINE + "::test_float32_divides_and_takes_roots_with_rounding",
        ),
    ),
    Mutation(
        name="norm-exponent-is-not-bounded",
        file=_NORM,
        old="    bounded = ntl.where(exponent > 89.0, 89.0, exponent)\n",
        new="    bounded = exponent\n",
        promise="A gate far below zero is closed, not NaN.",
        tests=(_GATED_KERNEL + "::test_gates_far_from_zero",),
    ),
    Mutation(
        name="norm-pieces-sum-before-the-gate",
        file=_NORM,
        old="""\
            if norm_before_gate == 0:
                term_gate""",
        new="""\
            if norm_before_gate != 0:
                term_gate""",
        promise="Where the gate comes first, what is normalised is the gated input.",
        tests=(_GATED_KERNEL + "::test_wide_rows",),
    ),
    Mutation(
        name="norm-gradient-of-pieces-without-its-mean",
        file=_NORM_GRADIENTS,
        old="""\
    mean_product = product_total * scale * inverse_group_size
    scales = scale""",
        new="""\
    mean_product = product_total * scale
    scales = scale""",
        promise="The mean of products is one over the whole group, in pieces too.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_wide_groups",),
    ),
    Mutation(
        name="norm-gradient-of-a-sigmoid-cancels",
        file=_NORM_GRADIENTS,
        old="                    slope = last_sigmoid * complement\n",
        new="                    slope = last_sigmoid * (1.0 - last_sigmoid)\n",
        promise="The slope of a wide open sigmoid keeps its digits.",
        tests=(
            _GATED_BACKWARD_KERNEL + "::test_gradients_are_right",
            _GATED_BACKWARD_KERNEL + "::test_a_wide_open_sigmoid",
        ),
    ),
    Mutation(
        name="norm-gradient-of-columns-behind-the-last",
        file=_NORM_GRADIENTS,
        old="            value = ntl.where(column[None, :] < num_columns_held, value, 0.0)\n",
        new="            value = ntl.where(column[None, :] <= num_columns_held, value, 0.0)\n",
        promise="Columns behind the last are zeros where rows behind the last are ones.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_no_eps",),
    ),
    Mutation(
        name="norm-gradient-of-a-bias-is-not-gated",
        file=_NORM_GRADIENTS,
        old="""\
                if activation != 0 and norm_before_gate:
                    bias_sums""",
        new="""\
                if activation != 0 and norm_before_gate == 0:
                    bias_sums""",
        promise="Where the gate comes last, the gradient of the bias is gated.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="norm-gradient-of-the-input-is-not-gated",
        file=_NORM_GRADIENTS,
        old="""\
                if activation != 0 and norm_before_gate == 0:
                    grad_input[step, last_piece] = grad_value * last_factor
                else:
                    grad_input[step, last_piece] = grad_value
""",
        new="""\
                grad_input[step, last_piece] = grad_value
""",
        promise="Where the gate comes first, the gradient of the input is gated.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="compiled-in-stride-within-a-tile",
        file=_NORM,
        old="        dilation=(row_stride, 1),\n",
        new="        dilation=(1, 1),\n",
        promise="Rows of a program are a compiled-in stride apart.",
        tests=(
            _GATED_KERNEL + "::test_row_strides_that_are_compiled_in_beside_others",
        ),
    ),
    Mutation(
        name="compiled-in-stride-between-tiles",
        file=_NORM,
        old="        strides=(num_rows * row_stride, num_columns),\n",
        new="        strides=(row_stride, num_columns),\n",
        promise="Programs are their rows times a compiled-in stride apart.",
        tests=(
            _GATED_KERNEL + "::test_row_strides_that_are_compiled_in_beside_others",
        ),
    ),
    Mutation(
        name="compiled-in-stride-loses-a-row",
        file="ntops_ext/torch/_rows.py",
        old="        shape = (1 + (num_rows - 1) * row_stride, num_columns)\n",
        new="        shape = ((num_rows - 1) * row_stride, num_columns)\n",
        promise="The last row is computed, too, where a row stride is compiled in.",
        tests=(_ROWS,),
    ),
    Mutation(
        name="gradients-share-sizes-of-other-strides",
        file=_NORM_GRADIENTS,
        old="    return tuple(None if row_strides else size for size in grad_output.shape[:-1])\n",
        new="    return tuple(grad_output.shape[:-1])\n",
        promise="Where a row stride is compiled in, each tensor has its own number of places.",
        tests=(
            _GATED_BACKWARD_KERNEL
            + "::test_row_strides_that_are_compiled_in_beside_others",
        ),
    ),
    Mutation(
        name="slabs-of-partial-sums-are-lost",
        file="ntops_ext/torch/_partial_sums.py",
        old="        for row, slab in zip(partial_sums, slabs, strict=True):\n",
        new="        for row, slab in zip(partial_sums[:1], slabs[:1], strict=True):\n",
        promise="Partial sums that 32 bits cannot address are all added.",
        tests=(
            _ROPE_BACKWARD_KERNEL
            + "::test_partial_sums_beyond_the_bound_are_added_in_slabs",
        ),
    ),
    Mutation(
        name="exp-overflows-early",
        file=_NORM,
        old="    return ntl.fma(series, half_power_of_two, 0.5) * 2.0\n",
        new="    return ntl.fma(series, half_power_of_two * 2.0, 1.0)\n",
        promise="1 + exp is finite wherever exp is.",
        tests=(_GATED_KERNEL + "::test_gates_just_before_exp_overflows",),
    ),
    Mutation(
        name="norm-gradient-input-padding",
        file=_NORM_GRADIENTS,
        old='        Tensor(shape=shape, name="input", other=padding),\n',
        new='        Tensor(shape=shape, name="input"),\n',
        promise="Lanes behind the last column, and rows behind the last, hold what they must.",
        tests=(_PADDING + "::test_gradients_of_gated_rms_norm",),
    ),
    Mutation(
        name="norm-gradient-incoming-padding",
        file=_NORM_GRADIENTS,
        old="""\
        name="grad_output",
        other=0,
""",
        new="""\
        name="grad_output",
""",
        promise="Rows behind the last add nothing to the gradients of weight and bias.",
        tests=(_PADDING + "::test_gradients_of_gated_rms_norm",),
    ),
    Mutation(
        name="norm-gradient-weight-padding",
        file=_NORM_GRADIENTS,
        old='        Tensor(shape=(num_columns,), name="weight", other=0)\n',
        new='        Tensor(shape=(num_columns,), name="weight")\n',
        promise="Weights behind the last column enter the sum of products as zeros.",
        tests=(_PADDING + "::test_gradients_of_gated_rms_norm",),
    ),
    Mutation(
        name="norm-gradient-products-are-contracted",
        file=_NORM_GRADIENTS,
        old="                products = ntl.fma(value, scaled * weights[piece], products)\n",
        new="                products = products + value * (scaled * weights[piece])\n",
        promise="No sum of a product is left to the compiler.",
        tests=(
            _GATED_BACKWARD_OFFLINE
            + "::test_no_sum_of_a_product_is_left_to_the_compiler",
        ),
    ),
    Mutation(
        name="sum-padding-is-not-zero",
        file=_SUM,
        old="            other=0,\n",
        new="",
        promise="Rows behind the last add nothing.",
        tests=(_PADDING + "::test_gradients_of_qk_norm_rope",),
    ),
    Mutation(
        name="sum-of-neighbours",
        file=_SUM,
        old="ntl.reshape(sums, (2, sums.shape[0] // 2, sums.shape[1])), 0)\n",
        new="ntl.reshape(sums, (sums.shape[0] // 2, 2, sums.shape[1])), 1)\n",
        promise="The rows of a block are added by halves: gradients keep their bits.",
        tests=(_SUM_KERNEL,),
    ),
    Mutation(
        name="held-pieces-are-the-first",
        file=_NORM,
        old="        piece_value = ntl.cast(input[held_piece], ntl.float32)\n",
        new="        piece_value = ntl.cast(input[0], ntl.float32)\n",
        promise="A group that is held in pieces is all of its columns.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="held-sum-without-the-first-piece",
        file=_NORM,
        old="        squares = ntl.fma(piece_value, piece_value, squares)\n",
        new="""\
        if held_piece != 0:
            squares = ntl.fma(piece_value, piece_value, squares)
""",
        promise="The root is of the mean of all pieces.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="held-weight-of-the-first-piece",
        file=_NORM,
        old="ntl.cast(weights[stored_piece], ntl.float32),\n",
        new="ntl.cast(weights[0], ntl.float32),\n",
        promise="Each piece has the weight of its own columns.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="held-bias-of-the-first-piece",
        file=_NORM,
        old="ntl.cast(biases[stored_piece], ntl.float32),\n",
        new="ntl.cast(biases[0], ntl.float32),\n",
        promise="Each piece has the bias of its own columns.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="held-gate-of-the-first-piece",
        file=_NORM,
        old="                    gatings[stored_piece],\n",
        new="                    gatings[0],\n",
        promise="Each piece has the gate of its own columns.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="held-pieces-are-stored-in-one",
        file=_NORM,
        old="        output[stored_piece] = piece_result\n",
        new="        output[0] = piece_result\n",
        promise="Each piece is stored where it was read.",
        tests=(_GATED_KERNEL + "::test_groups_that_are_held_in_pieces",),
    ),
    Mutation(
        name="gradient-sums-are-swapped",
        file=_NORM_GRADIENTS,
        old="ntl.join(first_terms, second_terms)",
        new="ntl.join(second_terms, first_terms)",
        promise="Of two sums side by side the first is that of squares.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gates_of_zero",),
    ),
    Mutation(
        name="gradient-sums-of-several-rows-are-one",
        file=_NORM_GRADIENTS,
        old="        second_total = _sum_of_few_columns(second_terms)\n",
        new="        second_total = _sum_of_few_columns(first_terms)\n",
        promise="The mean of products is not that of squares.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-sums-of-one-row-are-one",
        file=_NORM_GRADIENTS,
        old="        second_total = _sum_of_columns(second_terms, are_by_four)\n",
        new="        second_total = _sum_of_columns(first_terms, are_by_four)\n",
        promise="The mean of products is not that of squares.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-scalars-of-several-rows",
        file=_NORM_GRADIENTS,
        old="""\
            if first_tile.shape[0] == 1:
                # A number has no layout that the gradients could take on.
""",
        new="""\
            if first_tile.shape[0] >= 1:
                # A number has no layout that the gradients could take on.
""",
        promise="Each row has sums of its own.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-scalars-have-a-layout",
        file=_NORM_GRADIENTS,
        old="""\
            if first_tile.shape[0] == 1:
                # A number has no layout that the gradients could take on.
""",
        new="""\
            if first_tile.shape[0] == 0:
                # A number has no layout that the gradients could take on.
""",
        promise="The gradients of one row's columns stay in registers.",
        tests=(_GATED_BACKWARD_OFFLINE + "::test_no_register_is_spilled",),
    ),
    Mutation(
        name="gradient-weight-of-the-first-piece",
        file=_NORM_GRADIENTS,
        old="ntl.fma(value, scaled * weights[piece], products)\n",
        new="ntl.fma(value, scaled * weights[0], products)\n",
        promise="Each piece has the weight of its own columns.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-gate-by-the-first-weight",
        file=_NORM_GRADIENTS,
        old="            weighted = last_scaled * weights[last_piece]\n",
        new="            weighted = last_scaled * weights[0]\n",
        promise="The gradients of a piece are by the weight of its own columns.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-gate-by-the-first-bias",
        file=_NORM_GRADIENTS,
        old="                        normalized, weights[last_piece], biases[last_piece]\n",
        new="                        normalized, weights[last_piece], biases[0]\n",
        promise="The gradient of a gate is by the bias of its own columns.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-slope-of-the-first-piece",
        file=_NORM_GRADIENTS,
        old="last_factor = _widened(gates[last_piece], zero)\n",
        new="last_factor = _widened(gates[0], zero)\n",
        promise="The gradient of a gate is by its own slope.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-sums-of-the-first-piece",
        file=_NORM_GRADIENTS,
        old="""\
            weight_partials[summed_piece] = _sum_of_rows(weight_sums[summed_piece])
""",
        new="""\
            weight_partials[summed_piece] = _sum_of_rows(weight_sums[0])
""",
        promise="Each piece has sums over rows of its own.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="gradient-sums-go-on-in-the-first-piece",
        file=_NORM_GRADIENTS,
        old="ntl.fma(last_scaled, normalized, weight_sums_so_far[last_piece]),\n",
        new="ntl.fma(last_scaled, normalized, weight_sums_so_far[0]),\n",
        promise="Each piece has sums over rows of its own.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_pieces_of_more_rows_than_programs",),
    ),
    Mutation(
        name="gradient-sigmoid-of-the-first-piece",
        file=_NORM_GRADIENTS,
        old="                last_sigmoid = sigmoids[last_piece]\n",
        new="                last_sigmoid = sigmoids[0]\n",
        promise="What is held is of its own columns.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_gradients_are_right",),
    ),
    Mutation(
        name="norm-sums-of-half-the-warps",
        file=_NORM,
        old="                partial = halves[0] + halves[1]\n",
        new="                partial = halves[0] + halves[0]\n",
        promise="A sum is that of all columns.",
        tests=(_GATED_KERNEL,),
    ),
    Mutation(
        name="norm-gate-is-a-root",
        file=_NORM,
        old="            gating = gating_root * gating_root\n",
        new="            gating = gating_root\n",
        promise="A 16-bit result is gated by the sigmoid.",
        tests=(_GATED_KERNEL,),
    ),
    Mutation(
        name="sums-of-rows-of-half-the-warps",
        file=_SUM,
        old="            sums = halves[0] + halves[1]\n",
        new="            sums = halves[0] + halves[0]\n",
        promise="A sum is that of all rows.",
        tests=(_SUM_KERNEL,),
    ),
    Mutation(
        name="gradient-hidden-zero-is-one",
        file=_NORM_GRADIENTS,
        old="            zero = ntl.cast(scale < 0.0, ntl.int16)\n",
        new="            zero = ntl.cast(scale > 0.0, ntl.int16)\n",
        promise="What is computed once more is what it was.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_no_bit_depends_on_what_is_held",),
    ),
    Mutation(
        name="gradient-zero-is-not-hidden",
        file=_NORM_GRADIENTS,
        old="            zero = ntl.cast(scale < 0.0, ntl.int16)\n",
        new="            zero = ntl.cast(0, ntl.int16)\n",
        promise="What is computed once more holds no registers.",
        tests=(
            _GATED_BACKWARD_OFFLINE
            + "::test_a_multiprocessor_holds_as_many_programs_as_are_launched",
        ),
    ),
)

# -- Launches: what a kernel is called with, and the choices that results depend on. ----

_CHOICES = "ntops_ext/configs.py"
_CALL_OF_NORM = "ntops_ext/torch/_gated_rms_norm.py"
_CALL_OF_NORM_GRADIENTS = "ntops_ext/torch/_gated_rms_norm_backward.py"
_CALL_OF_ROPE = "ntops_ext/torch/_qk_norm_rope.py"
_CALL_OF_ROPE_GRADIENTS = "ntops_ext/torch/_qk_norm_rope_backward.py"
_CALL_OF_PACK = "ntops_ext/torch/_qk_norm_rope_pack.py"

_LAUNCHES = (
    Mutation(
        name="pieces-by-the-number-of-groups",
        file=_CHOICES,
        old="    if lanes > _MAX_HELD_LANES:\n",
        new="    if lanes > (_MAX_HELD_LANES if num_groups >= _FEW_GROUPS else 8192):\n",
        promise="A row's bits do not depend on the number of rows.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="shared-where-it-is-overwritten",
        file=_CALL_OF_NORM,
        old="        may_share = may_share and out.data_ptr() != input.data_ptr()\n",
        new="",
        promise="`out` may be `input`.",
        tests=(
            _GATED_KERNEL + "::test_in_place_on_the_input",
            _GATED_KERNEL + "::test_a_row_that_programs_share",
        ),
    ),
    Mutation(
        name="prepared-in-place-as-elsewhere",
        file=_CALL_OF_NORM,
        old="            verdict=may_share,\n",
        new="            verdict=layout.may_share,\n",
        promise="`out` may be `input`.",
        tests=(_PREPARED,),
    ),
    Mutation(
        name="shared-with-the-gate-first",
        file=_CALL_OF_NORM,
        old="group_size == input.shape[-1] and (gate is None or norm_before_gate)",
        new="group_size == input.shape[-1]",
        promise="The sum is of all columns of `input * act(gate)`.",
        tests=(_GATED_KERNEL + "::test_rows_that_programs_do_not_share",),
    ),
    Mutation(
        name="shared-groups-of-a-row",
        file=_CALL_OF_NORM,
        old="group_size == input.shape[-1] and (gate is None or norm_before_gate)",
        new="gate is None or norm_before_gate",
        promise="The mean is one over a group.",
        tests=(_GATED_KERNEL + "::test_rows_that_programs_do_not_share",),
    ),
    Mutation(
        name="shared-and-padded",
        file=_CHOICES,
        old="may_share and (piece is not None or group_size == lanes)",
        new="may_share",
        promise="A row's bits do not depend on the number of rows.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="shared-in-other-pieces",
        file=_CHOICES,
        old="                columns_per_piece=piece,\n                columns_per_share=share,\n",
        new="                columns_per_piece=share,\n                columns_per_share=share,\n",
        promise="A row's bits do not depend on the number of rows.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="shared-row-by-its-number-of-pieces",
        file=_NORM,
        old="_sum_of_columns(squares_of_all, whole_input.shape[0] > 1)",
        new="_sum_of_columns(squares_of_all, whole_input.shape[0] > 8)",
        promise="A row's bits do not depend on the number of rows.",
        tests=(_GATED_KERNEL + "::test_a_row_that_programs_share",),
    ),
    Mutation(
        name="shared-row-of-another-stride",
        file=_NORM,
        old='            choices["row_strides"]["whole_input"] = choices["row_strides"]["input"]\n',
        new='            choices["row_strides"]["whole_input"] = num_columns\n',
        promise="Tensors may have any strides.",
        tests=(_GATED_KERNEL + "::test_shared_rows_of_any_layout",),
    ),
    Mutation(
        name="warps-that-hold-the-same-columns",
        file=_CHOICES,
        old="        return GatedRMSNormConfig(rows_per_program=512 // lanes, num_warps=2)\n",
        new="        return GatedRMSNormConfig(rows_per_program=512 // lanes, num_warps=4)\n",
        promise="In place no warp reads what another has already written.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="tile-by-the-number-of-rows",
        file=_CHOICES,
        old="    return (remaining, *reversed(tile))\n",
        new="    return (min(remaining, next_power_of_2(row_sizes[0])), *reversed(tile))\n",
        promise="A new number of rows makes no new kernel.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="partial-sums-past-32-bits",
        file=_CHOICES,
        old="_MAX_PARTIAL_SUMS = 2**30\n",
        new="_MAX_PARTIAL_SUMS = 2**32\n",
        promise="Partial sums are addressed in 32 bits.",
        tests=(_ROPE_BACKWARD,),
    ),
    Mutation(
        name="mean-over-the-row",
        file=_CALL_OF_NORM,
        old="                1.0 / layout.group_size,\n",
        new="                1.0 / input.shape[-1],\n",
        promise="The mean is one over a group.",
        tests=(_GATED_KERNEL + "::test_a_group_is_not_the_row",),
    ),
    Mutation(
        name="absent-bias-is-plus-zero",
        file=_CALL_OF_NORM,
        old="                -0.0 if bias is None else bias,\n",
        new="                0.0 if bias is None else bias,\n",
        promise="Without a bias -0 stays -0.",
        tests=(_GATED_KERNEL + "::test_no_bias_keeps_the_sign_of_zero",),
    ),
    Mutation(
        name="options-without-types",
        file=_CALL_OF_NORM,
        old="    mode = (*options, *map(type, options), *[tensor is None",
        new="    mode = (*options, *[tensor is None",
        promise="1 is no bool, whatever came before.",
        tests=(
            _PREPARED + "::test_values_that_are_equal_and_wrong_are_refused",
            _GATED,
        ),
    ),
    Mutation(
        name="norm-overlap-with-the-weight",
        file=_CALL_OF_NORM,
        old='    for name, tensor in (("gate", gate), ("weight", weight), ("bias", bias)):\n',
        new='    for name, tensor in (("gate", gate), ("bias", bias)):\n',
        promise="An `out` that shares memory with a parameter is refused.",
        tests=(_GATED,),
    ),
    Mutation(
        name="definition-of-any-strides",
        file=_CALL_OF_NORM,
        old="            return result.contiguous()\n",
        new="            return result\n",
        promise="A result that is allocated is contiguous.",
        tests=(_GATED,),
    ),
    Mutation(
        name="gradients-of-the-first-groups-weight",
        file=_CALL_OF_NORM_GRADIENTS,
        old="        1.0 if weight is None else part.own_columns(weight),\n",
        new="        1.0 if weight is None else weight[: input.shape[-1]],\n",
        promise="Each group has the weight of its own columns.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_wide_groups",),
    ),
    Mutation(
        name="a-graph-of-the-gradients-without-an-error",
        file=_CALL_OF_NORM_GRADIENTS,
        old="        if torch.is_grad_enabled():\n",
        new="        if False:\n",
        promise="Gradients of gradients are refused, not left out.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_second_derivatives_are_refused",),
    ),
    Mutation(
        name="partial-sums-of-the-first-part",
        file=_CALL_OF_NORM_GRADIENTS,
        old="            partials = partials[self.first_block : self.first_block + self.num_blocks]\n",
        new="            partials = partials[: self.num_blocks]\n",
        promise="Each launch of a call that is cut has partial sums of its own.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_a_call_that_is_cut",),
    ),
    Mutation(
        name="gradients-without-padding-by-ones",
        file=_CALL_OF_NORM_GRADIENTS,
        old="            padding=1.0 if _pads_with_ones(layout) else 0,\n",
        new="            padding=0,\n",
        promise="With an `eps` of 0, rows behind the last make no NaN.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_no_eps",),
    ),
    Mutation(
        name="gradients-of-a-subnormal-eps",
        file=_CALL_OF_NORM_GRADIENTS,
        old="    return layout.eps < _SMALLEST_EPS and",
        new="    return layout.eps == 0.0 and",
        promise="An `eps` that an inverse root takes for 0 is treated as 0.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_an_eps_that_a_gpu_takes_for_zero",),
    ),
    Mutation(
        name="partial-sums-that-nobody-writes",
        file=_CALL_OF_NORM_GRADIENTS,
        old="        num_blocks = -(-num_tiles // tiles_per_program)\n",
        new="        num_blocks = min(num_tiles, config.max_row_blocks)\n",
        promise="Every partial sum that is added was written.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_every_partial_sum_is_written",),
    ),
    Mutation(
        name="parts-share-partial-sums",
        file=_CALL_OF_NORM_GRADIENTS,
        old="        first_block += num_blocks\n",
        new="",
        promise="The parts of a call that is cut have partial sums of their own.",
        tests=(_GATED_BACKWARD_KERNEL + "::test_a_call_that_is_cut",),
    ),
    Mutation(
        name="order-by-the-tokens-of-one-entry",
        file=_CALL_OF_ROPE,
        old="        order=rounding.order(batch * tokens * num_heads),\n",
        new="        order=rounding.order(tokens * num_heads),\n",
        promise="PyTorch's order of additions depends on all heads of a call.",
        tests=(_ROPE_KERNEL + "::test_all_heads_of_a_call_decide_on_the_order",),
    ),
    Mutation(
        name="order-of-k-by-the-heads-of-q",
        file=_CALL_OF_PACK,
        old="        k_order=rounding.order(batch * tokens * num_kv_heads),\n",
        new="        k_order=rounding.order(batch * tokens * num_heads),\n",
        promise="PyTorch's order of additions depends on all heads of a call, K's on K's.",
        tests=(_ROPE_KERNEL + "::test_q_and_k_may_be_added_in_different_orders",),
    ),
    Mutation(
        name="sixteen-rows-are-few",
        file="ntops_ext/torch/_eager.py",
        old="        return self.order_of_few_rows if num_rows < FEW_ROWS else",
        new="        return self.order_of_few_rows if num_rows <= FEW_ROWS else",
        promise="PyTorch lays out 16 rows as it does more.",
        tests=(_EAGER_ROUNDING,),
    ),
    Mutation(
        name="rounding-of-another-dtype",
        file="ntops_ext/torch/_eager.py",
        old="        key = (device, dtype, head_dim)\n",
        new="        key = (device, head_dim)\n",
        promise="How PyTorch rounds is found out for each dtype.",
        tests=(_EAGER_ROUNDING,),
    ),
    Mutation(
        name="rounding-under-the-callers-modes",
        file="ntops_ext/torch/_eager.py",
        old="        torch.autocast(device.type, enabled=False),\n",
        new="",
        promise="What the caller has switched on does not reach into the observation.",
        tests=(_EAGER_ROUNDING,),
    ),
    Mutation(
        name="rope-in-place-at-a-shift",
        file=_CALL_OF_ROPE,
        old="            tensor is input and _checks.is_same_view(out, input)\n",
        new="            tensor is input\n",
        promise="An `out` that overlaps the input at a shift is refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="rope-chunks-begin-the-table-anew",
        file=_CALL_OF_ROPE,
        old="            (input[batch, rows], output[batch, rows], weight, table[rows], eps)\n",
        new="            (input[batch, rows], output[batch, rows], weight, table, eps)\n",
        promise="A call that is cut equals one that is not.",
        tests=(_ROPE_KERNEL + "::test_a_call_that_is_cut_equals_one_that_is_not",),
    ),
    Mutation(
        name="pack-chunks-without-the-prefix",
        file=_CALL_OF_PACK,
        old="            max(chunk.row_start - prefix, 0), max(chunk.row_stop - prefix, 0)\n",
        new="            chunk.row_start, max(chunk.row_stop - prefix, 0)\n",
        promise="A call that is cut equals one that is not.",
        tests=(_ROPE_KERNEL + "::test_a_call_that_is_cut_equals_one_that_is_not",),
    ),
    Mutation(
        name="pack-overlap-of-other-rows",
        file=_CALL_OF_PACK,
        old="            if rows is None or not _checks.is_same_view(written[:, rows], tensor):\n",
        new="            if rows is None:\n",
        promise="A prefix or a source that overlaps other rows than its own is refused.",
        tests=(_ROPE,),
    ),
    Mutation(
        name="pack-one-prefix-is-kept",
        file=_CALL_OF_PACK,
        old='    return kept >= {"k_prefix", "v_prefix"}\n',
        new='    return bool(kept & {"k_prefix", "v_prefix"})\n',
        promise="A prefix that is not in place is copied, wherever the other is.",
        tests=(
            _ROPE_KERNEL + "::test_a_prefix_is_copied_where_the_other_lies_in_place",
        ),
    ),
    Mutation(
        name="pack-v-counts-no-version",
        file=_CALL_OF_PACK,
        old="        written = _WRITTEN if part.prefix or v_src is not None else _WRITTEN[:2]\n",
        new="        written = _WRITTEN[:2]\n",
        promise="Autograd notices that V was written.",
        tests=(_PREPARED + "::test_written_tensors_count_a_version",),
    ),
    Mutation(
        name="rope-gradient-chunks-share-partial-sums",
        file=_CALL_OF_ROPE_GRADIENTS,
        old="            start = stop\n",
        new="",
        promise="The launches of a call that is cut have partial sums of their own.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_it_is_cut_into_launches",),
    ),
    Mutation(
        name="rope-gradient-loses-the-last-tokens",
        file=_CALL_OF_ROPE_GRADIENTS,
        old="                -(-(chunk.row_stop - chunk.row_start) // config.tokens_per_program),\n",
        new="                (chunk.row_stop - chunk.row_start) // config.tokens_per_program or 1,\n",
        promise="Every run of tokens has a partial sum.",
        tests=(_ROPE_BACKWARD_KERNEL + "::test_what_pads_a_program_adds_nothing",),
    ),
    Mutation(
        name="held-pieces-that-are-slower",
        file=_CHOICES,
        old="_PADDED_ALL_THE_SAME = (10240,)\n",
        new="_PADDED_ALL_THE_SAME = ()\n",
        promise="Groups that are faster padded are padded.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="held-pieces-are-read-twice",
        file=_CALL_OF_NORM,
        old="        holds_pieces=config.holds_pieces,\n",
        new="        holds_pieces=False,\n",
        promise="What is held in pieces is read once.",
        tests=(_GATED_OFFLINE + "::test_a_group_that_is_held_in_pieces_is_read_once",),
    ),
    Mutation(
        name="stages-in-all-of-shared-memory",
        file=_CHOICES,
        old="    room = shared_memory - 4 * columns - _BYTES_OF_EXCHANGES\n",
        new="    room = shared_memory\n",
        promise="Beside the steps on their way there is room for exchanges.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="stages-one-too-many",
        file=_CHOICES,
        old="1 + max(room //",
        new="2 + max(room //",
        promise="The steps on their way fit in shared memory.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="stages-of-single-rows",
        file=_CHOICES,
        old="    columns *= config.rows_per_step\n",
        new="",
        promise="A step is all its rows.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="stages-of-single-pieces",
        file=_CHOICES,
        old="""\
        columns = group_size

    columns *=""",
        new="""\
        columns = config.columns_per_piece

    columns *=""",
        promise="A step is all pieces of a group.",
        tests=(_CONFIGS,),
    ),
    Mutation(
        name="stages-without-the-gate",
        file=_CALL_OF_NORM_GRADIENTS,
        old="""\
    rows = [tensor for tensor in (grad_output, input, gate) if tensor is not None]
""",
        new="""\
    rows = [tensor for tensor in (grad_output, input) if tensor is not None]
""",
        promise="A step is the rows of all tensors.",
        tests=(
            _GATED_BACKWARD_OFFLINE
            + "::test_as_many_steps_are_on_their_way_as_the_device_has_room_for",
        ),
    ),
)

# -- Graphs, the module, the registration. ----------------------------------------------

_TRACED = "ntops_ext/torch/_compiled.py"
_MODULE = "ntops_ext/nn.py"
_MEMBERS = "ntops_ext/registry.py"

_SURFACE = (
    Mutation(
        name="fakes-of-the-inputs-strides",
        file=_TRACED,
        old="    return tensor.new_empty(tensor.shape)\n",
        new="    return torch.empty_like(tensor)\n",
        promise="A fake has the strides of the result.",
        tests=(_COMPILED + "::test_fakes_have_the_strides_of_results",),
    ),
    Mutation(
        name="schema-without-a-written-out",
        file=_TRACED,
        old='    f"gated_rms_norm_out({_GATED_RMS_NORM_ARGUMENTS}, Tensor(a!) out) -> ()",\n',
        new='    f"gated_rms_norm_out({_GATED_RMS_NORM_ARGUMENTS}, Tensor out) -> ()",\n',
        promise="A graph knows that `out` is written.",
        tests=(_COMPILED + "::test_custom_operators_keep_pytorchs_rules",),
    ),
    Mutation(
        name="schema-without-a-written-v",
        file=_TRACED,
        old="Tensor(b!) k_out, Tensor(c!) v_out,",
        new="Tensor(b!) k_out, Tensor v_out,",
        promise="A graph knows that V is written.",
        tests=(_COMPILED + "::test_custom_operators_keep_pytorchs_rules",),
    ),
    Mutation(
        name="layouts-of-inductors-choice",
        file="ntops_ext/torch/_custom_ops.py",
        old="tags=(torch.Tag.pt2_compliant_tag, _EXACT_STRIDES))\n",
        new="tags=(torch.Tag.pt2_compliant_tag,))\n",
        promise="Inductor hands over the strides that eager code would.",
        tests=(_COMPILED + "::test_inductor_hands_over_the_strides_of_eager_code",),
    ),
    Mutation(
        name="traced-out-loses-gradients",
        file=_TRACED,
        old="""\
    if _is_differentiated(input, weight, gate, bias, out):
        raise _gated_rms_norm.no_gradients_into_out()

""",
        new="",
        promise="Gradients into `out` are refused in a graph, too.",
        tests=(_COMPILED + "::test_gradients_into_what_is_given_are_refused",),
    ),
    Mutation(
        name="second-gradients-of-a-graph",
        file=_TRACED,
        old="    _custom_ops.differentiate(backward_operator, None, refuse)\n",
        new="",
        promise="Second gradients of a graph are refused by name.",
        tests=(_COMPILED + "::test_second_gradients_are_refused",),
    ),
    Mutation(
        name="gradients-that-nobody-needs",
        file=_TRACED,
        old="        needs_input_grad = ctx.needs_input_grad[:num_differentiable]\n",
        new="        needs_input_grad = [True] * num_differentiable\n",
        promise="A graph computes only the gradients that are asked for.",
        tests=(_COMPILED + "::test_only_the_gradients_that_are_asked_for",),
    ),
    Mutation(
        name="module-begins-with-ones",
        file=_MODULE,
        old="            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)\n",
        new="            torch.nn.init.ones_(self.weight)\n",
        promise="A new module's scale, with its offset, is one.",
        tests=(_NN,),
    ),
    Mutation(
        name="module-without-parameters-takes-any-width",
        file=_MODULE,
        old="            if input.shape[-1:] != (self.hidden_size,):\n",
        new="            if input.ndim == 0:\n",
        promise="An input of another width is refused, parameters or not.",
        tests=(_NN,),
    ),
    Mutation(
        name="module-without-groups",
        file=_MODULE,
        old="            group_size=self.group_size,\n",
        new="",
        promise="The module computes what its arguments say.",
        tests=(_NN,),
    ),
    Mutation(
        name="what-others-registered-is-removed",
        file=_MEMBERS,
        old="        if present is not self.value and present is not _ABSENT:\n",
        new="        if False:\n",
        promise="`unregister` leaves what others have put there since.",
        tests=(_REGISTRY,),
    ),
    Mutation(
        name="listed-names-are-replaced",
        file=_MEMBERS,
        old="        is_taken = previous is not _ABSENT or name in package.__all__\n",
        new="        is_taken = previous is not _ABSENT\n",
        promise="A name that ntops lists stays its own unless it is asked to be replaced.",
        tests=(_REGISTRY,),
    ),
    Mutation(
        name="registrations-of-a-former-package",
        file=_MEMBERS,
        old="        key = (package, name)\n",
        new="        key = (package_name, name)\n",
        promise="`unregister` undoes what was done to a package that was imported anew since.",
        tests=(_REGISTRY,),
    ),
    Mutation(
        name="deleted-members-stay-listed",
        file=_MEMBERS,
        old="        elif present is not _ABSENT:\n            delattr",
        new="        elif present is _ABSENT:\n            return\n        else:\n            delattr",
        promise="`unregister` takes a name out of the list although the member was deleted.",
        tests=(_REGISTRY,),
    ),
    Mutation(
        name="deleted-members-are-taken-for-ntops",
        file=_MEMBERS,
        old=" or (previous is _ABSENT and _is_listed_by_us(key)):",
        new=":",
        promise="`register` restores a member of ours that was deleted.",
        tests=(_REGISTRY,),
    ),
    Mutation(
        name="listed-names-are-removed",
        file=_MEMBERS,
        old="        if not self.was_listed and self.name in self.package.__all__:\n",
        new="        if self.name in self.package.__all__:\n",
        promise="`unregister` leaves ntops' own names in its list.",
        tests=(_REGISTRY,),
    ),
)

MUTATIONS = (
    *_LAUNCH_PLANS,
    *_PREPARED_CALLS,
    *_ARGUMENTS,
    *_KERNELS,
    *_LAUNCHES,
    *_SURFACE,
)
