"""A prepared launch: everything of one call that the next call of its layout would work out again, except addresses.

A plan is made from an ordinary call that was watched. `Watcher` stands where NineToothed's generated launch function
expects its kernel; Triton itself then says what it launched: it hands the bound arguments to the grid function, and the
call returns the compiled kernel. Nothing is worked out a second time, and plain and auto-tuned kernels look the same.
"""

import functools

from ninetoothed_patches import triton_abi
from ninetoothed_patches.call_key import compile_function


class Watcher:
    """Stands in for a kernel in its launch function, and keeps what the last launch was.

    Not thread-safe: its cache holds a lock around the call.
    """

    def __init__(self, kernel):
        self._kernel = kernel
        self._launched = None

    def __getitem__(self, grid):
        def watched_grid(bound):
            size = grid(bound)
            # An auto-tuner launches its candidates first: the last launch is the one that counts.
            self._launched = dict(bound), size

            return size

        launch = self._kernel[watched_grid]

        def watched_launch(*args, **options):
            compiled = launch(*args, **options)
            self._launched = *self._launched, compiled

            return compiled

        return watched_launch

    def take(self):
        """The last launch: bound arguments, grid, compiled kernel. Forgotten here, for it holds tensors."""

        launched, self._launched = self._launched, None

        return launched


class Plan:
    """One prepared launch. It holds no tensor, no address, no stream and no hook.

    `launch(stream, *addresses)` launches. The other fields say for which calls, see `PlanCache`.
    """

    __slots__ = (
        "alignments",
        "compiled",
        "current_device",
        "current_stream",
        "device",
        "driver",
        "fits",
        "is_kept",
        "key",
        "launch",
        "scalars",
        "stamp",
        "state",
        "store",
    )


def prepare_launch(launched, pointers, arguments):
    """The launch that was watched, as a function of a stream and addresses.

    :param launched: What `Watcher.take` returned.
    :param pointers: For each tensor argument of the call, in order: the name of the kernel's parameter that takes its
        address (None if none does), and the argument's index in the call.
    :param arguments: The call's arguments.
    :return: The function, or None if the kernel was not given the tensors where it should have been.
    """

    bound, grid, compiled = launched
    grid = (*grid, 1, 1)[:3]

    # Placeholders for what changes with each call. Objects, so that they can be found again by identity.
    stream, addresses = object(), [object() for _ in pointers]
    given = {}

    for (name, index), address in zip(pointers, addresses, strict=True):
        if name is None:
            continue

        if bound.get(name) is not arguments[index]:
            return None

        given[name] = address

    if any(hasattr(value, "data_ptr") for value in ({**bound, **given}).values()):
        return None

    launcher = compiled.run
    launch = launcher
    template = (
        *grid,
        stream,
        compiled.function,
        compiled.packed_metadata,
        # Launch metadata and hooks: a call that anybody watches is not planned.
        None,
        None,
        None,
        *(
            given.get(name, bound[name])
            for name in triton_abi.kernel_arguments(compiled, bound)
        ),
    )
    below = triton_abi.c_launch(launcher, template)

    if below is not None:
        launch, template = below

    # From 3.7 on the C function takes the kernel's arguments as one tuple.
    *head, last = template
    tail = last if isinstance(last, tuple) else None
    flat = (*head, *tail) if tail is not None else template
    roles = {id(stream): "stream"} | {
        id(address): f"address_{position}" for position, address in enumerate(addresses)
    }
    slots = tuple(roles.get(id(value)) for value in flat)
    bind = _binder(slots, len(head) if tail is not None else None, len(pointers))

    return bind(launch, *(value for value, slot in zip(flat, slots) if slot is None))


@functools.lru_cache(maxsize=1024)
def _binder(slots, tuple_start, address_count):
    """A function that binds the constants of a launch, and returns the launch as a function of what changes.

    The call is spelled out, `launch(c0, c1, c2, stream, c4, ..., address_0, ...)`: 0.2 us less than copying a list and
    filling it in, with 36 arguments.

    :param slots: For each argument, what goes there on each call, or None for a constant.
    :param tuple_start: From which argument on they go into one tuple, or None.
    """

    names = [slot or f"c{index}" for index, slot in enumerate(slots)]
    constants = [name for name, slot in zip(names, slots) if slot is None]
    addresses = [f"address_{position}" for position in range(address_count)]

    if tuple_start is None:
        given = ", ".join(names)
    else:
        given = ", ".join(
            [*names[:tuple_start], f"({', '.join(names[tuple_start:])},)"]
        )

    source = f"""\
def bind({", ".join(["launch", *constants])}):
    def launch_plan({", ".join(["stream", *addresses])}):
        launch({given})

    return launch_plan
"""

    return compile_function(source, "bind")
