"""A prepared launch: everything of one call that the next call of its layout would work out again, except addresses.

A plan is made from an ordinary call that was watched. `Watcher` stands where NineToothed's generated launch function
expects its kernel; Triton itself then says what it launched: it hands the bound arguments to the grid function, and the
call returns the compiled kernel. Nothing is worked out a second time, and plain and auto-tuned kernels look the same.
"""

import functools

from ninetoothed_patches import dependent_launch, triton_abi
from ninetoothed_patches.call_key import compile_function


class Watcher:
    """Watches calls of a launch function, one at a time.

    :param kernel: What the launch function calls.
    :param replace: A function that makes of the launch function one that calls a given object in the kernel's place.
    """

    def __init__(self, kernel, replace):
        self._kernel = kernel
        self._launched = None
        # Made once: a call that makes a plan would have to make a function too.
        self._launch = replace(self)

    def watch(self, *arguments):
        """Call the launch function.

        :return: What that launched, last if it was several times: bound arguments, grid, compiled kernel. None if nothing
            was.
        """

        try:
            self._launch(*arguments)

            return self._launched
        finally:
            self._launched = None

    def __getitem__(self, grid):
        asked = None

        def watched_grid(bound):
            nonlocal asked

            size = grid(bound)
            # An auto-tuner launches its candidates first: the last launch is the one that counts.
            asked = bound, size

            return size

        launch = self._kernel[watched_grid]

        def watched_launch(*args, **options):
            compiled = launch(*args, **options)
            # A hook may cancel a compilation: then there is no kernel, and no grid was asked for.
            self._launched = None if compiled is None else (*asked, compiled)

            return compiled

        return watched_launch


class Kind:
    """Stands in a plan's key for a driver, a device, and the types and devices of a call's arguments.

    It is equal only to itself, so that a key is hashed and compared without these: they are half of its parts.
    """

    __slots__ = ("device", "driver")

    def __init__(self, driver, device):
        self.driver = driver
        self.device = device


class Plan:
    """One prepared launch. It holds no tensor, no address, no stream and no hook.

    `launch(stream, *addresses)` launches; it is None until the plan is first used, and `launched`, which it is made of,
    from then on. `compiled` is the kernel, which stays loaded. `successors` are plans that were used next after this one.
    The other fields say for which calls.

    :param key: A `Kind`, Triton's state, and the layout of the call.
    :param store: Where Triton keeps the kernels of that device.
    :param launched: What `Watcher.watch` returned, without tensors.
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
        "launched",
        "scalars",
        "stamp",
        "state",
        "store",
        "successors",
    )

    def __init__(self, key, store, launched):
        self.key = key
        self.store = store
        self.launched = launched
        self.compiled = launched[-1]
        self.launch = None
        self.fits = None
        self.scalars = ()
        self.successors = ()
        self.is_kept = True

    def drop(self):
        """No call is launched by this plan any longer, even if it is still another plan's successor."""

        self.is_kept = False
        # Else the plans that are dropped might keep each other, and all that were dropped before.
        self.successors = ()


class LaunchForm:
    """How one compiled kernel is launched: all that its plans have in common.

    :param compiled: The compiled kernel, already loaded.
    :param bound: Its arguments by name, as Triton bound them for some launch.
    :param pointers: The names of those that are tensors' addresses, in the order of the handle's tensors.
    """

    def __init__(self, compiled, bound, pointers):
        names = triton_abi.kernel_arguments(compiled, bound)
        # Placeholders for what changes, as objects: they are found again by identity.
        *grid, stream = _placeholders(4)
        arguments = _placeholders(len(names))
        template = (
            *grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            # Launch metadata and hooks: a call that anybody watches is not planned.
            None,
            None,
            None,
            *arguments,
        )
        launcher = compiled.run
        c_launch = triton_abi.c_launch(
            launcher,
            template,
            is_dependent=dependent_launch.suits(compiled),
        )
        launch, given = c_launch or (launcher, template)
        roles = {id(stream): "stream"}
        roles |= {id(size): f"grid_{axis}" for axis, size in enumerate(grid)}

        for index, (name, argument) in enumerate(zip(names, arguments, strict=True)):
            roles[id(argument)] = (
                f"address_{pointers.index(name)}"
                if name in pointers
                else f"argument_{index}"
            )

        # From 3.7 on the C function takes the kernel's arguments as one tuple.
        is_nested = isinstance(given[-1], tuple)
        *head, tail = given if is_nested else (*given, ())
        self._takes_all = len(names) == len(bound)
        self._names = names
        self._launch = launch
        self._constants = tuple(
            value for value in (*head, *tail) if id(value) not in roles
        )
        self._bind = _binder(
            tuple(roles.get(id(value)) for value in head),
            tuple(roles.get(id(value)) for value in tail) if is_nested else None,
            len(names),
            len(pointers),
        )

    def bind(self, grid, bound):
        """A function of a stream and the tensors' addresses that launches, on this grid and with these arguments."""

        arguments = (
            bound.values() if self._takes_all else [bound[name] for name in self._names]
        )

        return self._bind(self._launch, self._constants, (*grid, 1, 1)[:3], arguments)


class _Placeholder:
    """Can be handed on, and nothing else: whoever compares it or asks for its truth would take an argument's for it."""

    def __eq__(self, other):
        raise TypeError("An argument that is not known yet cannot be compared.")

    def __bool__(self):
        raise TypeError("An argument that is not known yet is neither true nor false.")


def _placeholders(count):
    return tuple(_Placeholder() for _ in range(count))


@functools.lru_cache(maxsize=1024)
def _binder(head, nested, argument_count, address_count):
    """A function that binds a launch to its constants, grid and arguments.

    The launch is spelled out, `launch(grid_0, grid_1, grid_2, stream, constant_4, ..., address_0, argument_1, ...)`: with
    36 arguments 0.2 us less than to copy a list and fill it in.

    :param head: For each argument of the launch its role, or None for a constant.
    :param nested: The same for those that go into one tuple at the end, or None if there is none.
    """

    roles = [
        role or f"constant_{index}"
        for index, role in enumerate((*head, *(nested or ())))
    ]
    constants = [role for role in roles if role.startswith("constant_")]
    arguments = [f"argument_{index}" for index in range(argument_count)]
    addresses = [f"address_{position}" for position in range(address_count)]
    given = roles[: len(head)]

    if nested is not None:
        given.append(f"({', '.join(roles[len(head) :])},)")

    source = f"""\
def bind(launch, constants, grid, arguments):
    [{", ".join(constants)}] = constants
    grid_0, grid_1, grid_2 = grid
    [{", ".join(name if name in roles else "_" for name in arguments)}] = arguments

    def launch_plan({", ".join(["stream", *addresses])}):
        launch({", ".join(given)})

    return launch_plan
"""

    return compile_function(source, "bind")
