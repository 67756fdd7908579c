"""The only file that touches NineToothed: a kernel that it has made becomes a handle with launch plans."""

import hashlib
import importlib.metadata
import sys
import types

import ninetoothed
import ninetoothed.generation
from ninetoothed.tensor import Tensor

from ninetoothed_patches import source_files, triton_abi
from ninetoothed_patches.errors import UnsupportedVersionError
from ninetoothed_patches.locks import ProcessLock
from ninetoothed_patches.plan_cache import PlanCache

SUPPORTED = "0.26"

# As an attribute of the package, `ninetoothed.jit` is the function of that name.
_jit_module = sys.modules[ninetoothed.jit.__module__]

_original_call = None

# Held while NineToothed is changed.
_SWITCH = ProcessLock()


def check():
    """Raise `UnsupportedVersionError` unless NineToothed and Triton are ones that are known."""

    version = importlib.metadata.version("ninetoothed")
    found = f"found NineToothed {version} and Triton {triton_abi.version()}"

    if not version.startswith(f"{SUPPORTED}.") or not triton_abi.version_is_supported(
        triton_abi.version()
    ):
        raise UnsupportedVersionError(
            f"{found}; launch plans need NineToothed {SUPPORTED} and Triton {triton_abi.SUPPORTED}."
        )

    missing = triton_abi.missing_features()

    if missing:
        raise UnsupportedVersionError(
            f"{found}, without {', '.join(missing)}: this is not the launch path that plans were written for."
        )


def install(max_plans):
    """Give every handle that NineToothed makes from now on a checked source and launch plans.

    :param max_plans: A function that says, when a handle is made, how many plans it may hold.
    """

    global _original_call

    check()

    with _SWITCH.held():
        if _original_call is None:
            _original_call = _install(max_plans)


def _install(max_plans):
    original = _jit_module.JIT.__call__

    def call(self):
        # `aot` does not come here; `jit` with another caller does.
        if self._caller != "torch":
            return original(self)

        return plan(_make_checked(original, self), max_plans())

    _jit_module.JIT.__call__ = call

    return original


def uninstall():
    """Put NineToothed back as it was. Handles keep what they are."""

    global _original_call

    with _SWITCH.held():
        if _original_call is not None:
            _jit_module.JIT.__call__ = _original_call
            _original_call = None


def is_installed():
    return _original_call is not None


def make(arrangement, application, tensors, options, max_plans):
    """What `ninetoothed.make` returns, of a checked source and, if it is a handle, with launch plans."""

    check()

    with _SWITCH.held():
        original = _original_call or _jit_module.JIT.__call__

    checked = type(
        "JIT",
        (_jit_module.JIT,),
        {"__call__": lambda self: _make_checked(original, self)},
    )
    checked_jit = _with_globals(_jit_module.jit, JIT=checked)
    made = _with_globals(ninetoothed.make, jit=checked_jit)(
        arrangement, application, tensors, **options
    )

    return plan(made, max_plans) if isinstance(made, _jit_module._Handle) else made


def _make_checked(call, jit):
    """What `call`, `JIT.__call__`, makes of `jit`, without executing a file of NineToothed's folder."""

    sources = {}

    def cache_source(source):
        digest = hashlib.sha256(source.encode("utf-8")).hexdigest()
        # As NineToothed names it, at whose folder tests may point elsewhere.
        path = ninetoothed.generation.CACHE_DIR / f"{digest}.py"
        source_files.keep(path, source)
        sources[str(path)] = source

        return path

    def import_from_path(name, path):
        return source_files.load(name, path, sources[path])

    generator = _jit_module.CodeGenerator
    checked = type(
        generator.__name__,
        (generator,),
        {"__call__": _with_globals(generator.__call__, cache_source=cache_source)},
    )

    return _with_globals(
        call, CodeGenerator=checked, import_from_path=import_from_path
    )(jit)


def plan(handle, max_plans):
    """`handle`, with launch plans. The given handle itself is left as it is."""

    if isinstance(handle, PlannedHandle):
        return handle

    if not isinstance(handle, _jit_module._Handle):
        raise TypeError(
            f"`handle` must be what `ninetoothed.make` returned, but is of type {type(handle).__qualname__}."
        )

    check()

    return PlannedHandle._of(handle, max_plans)


class PlannedHandle(_jit_module._Handle):
    """A NineToothed handle that prepares launches. Called exactly as the handle it was made from."""

    @classmethod
    def _of(cls, handle, max_plans):
        launch = handle._launch
        kernel = handle._kernel
        tuned_name = f"{kernel.__name__}_with_auto_tuning"
        launched_name = (
            tuned_name if tuned_name in launch.__globals__ else kernel.__name__
        )
        parameters, never = _parameters(kernel, launch)
        cache = PlanCache(
            kernel=kernel,
            launched=launch.__globals__[launched_name],
            launch=launch,
            replace=lambda other: _with_globals(launch, **{launched_name: other}),
            parameters=parameters,
            never=never,
            bound=max_plans,
        )
        # A class for this handle alone: its `__call__` is the entry itself, without a method around it that packs and
        # unpacks the arguments (0.2 us).
        own = type(cls.__name__, (cls,), {"__call__": cache.entry})
        planned = own(kernel, launch, handle._source)
        planned._cache = cache

        return planned

    def repeater(self, *arguments):
        """See `ninetoothed_patches.repeater`."""

        return self._cache.repeater(arguments)

    def cache_info(self):
        """What became of this handle's calls: see `ninetoothed_patches.cache_info`."""

        return self._cache.info()


def _with_globals(function, **replaced):
    """`function`, with some of its globals replaced for it alone."""

    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__

    return copy


def _parameters(kernel, launch):
    """What the launch function's parameters are, and why no call of it can be planned, if none can.

    :return: Pairs as `PlanCache` takes them, none where there is a reason, and the reason or None.
    """

    code = launch.__code__
    names = code.co_varnames[: code.co_argcount]

    if not triton_abi.is_compiled(kernel):
        return [], "interpreter"

    if any(name.startswith("__") for name in names):
        # They may be names of the entry's own.
        return [], "reserved parameter name"

    if {"offsets", "values"} & set(code.co_names):
        return [], "jagged"

    pointers = {
        match[1]: parameter
        for parameter in kernel.arg_names
        if (match := Tensor.pointer_pattern().fullmatch(parameter))
    }
    scalars = {
        ninetoothed.naming.remove_prefixes(parameter) for parameter in kernel.arg_names
    }

    if not set(names) <= pointers.keys() | scalars:
        return [], "unknown launch function"

    return [(name, pointers.get(name)) for name in names], None
