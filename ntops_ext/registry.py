"""The operators as members of ntops: `ntops.kernels.X` and `ntops.torch.X`.

ntops' registry is two packages with a list of names each, `__all__`. InfiniCore, when it is
imported, goes through that of `ntops.torch` and puts itself in place of the global `torch`
of each function's module. Our functions' modules hold nothing else that uses that global.
"""

import dataclasses
import importlib
import warnings

# What `ntops_ext.torch` exports that computes nothing of tensors.
_QUESTIONS = ("eager_rounding",)

_ABSENT = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """One name of ours in a package of ntops, and what was there before."""

    package: object
    name: str
    value: object
    previous: object
    was_listed: bool

    def add(self):
        setattr(self.package, self.name, self.value)

        if self.name not in self.package.__all__:
            self.package.__all__.append(self.name)

    def remove(self):
        present = vars(self.package).get(self.name, _ABSENT)

        if present is not self.value and present is not _ABSENT:
            # Somebody else has put something there since: it is not ours to take away.
            return

        if self.previous is not _ABSENT:
            setattr(self.package, self.name, self.previous)
        elif present is not _ABSENT:
            delattr(self.package, self.name)

        if not self.was_listed and self.name in self.package.__all__:
            self.package.__all__.remove(self.name)


# What this process has registered, by the package, which may be imported anew, and its own name.
_entries = {}


def register(*, replace: bool = False) -> tuple[str, ...]:
    """Make the operators members of ntops, for this process.

    `ntops.kernels` gets the kernels' modules and `ntops.torch` the functions, and their
    `__all__` get the names. Registering again changes nothing. `unregister` undoes it.

    InfiniCore looks at ntops' lists once, when it is imported: register before that for it
    to see the operators. Nothing else depends on the order. Our functions take PyTorch's
    tensors, and refuse others by a TypeError.

    :param replace: What to do where ntops has a name already. `False` leaves what is there
        and warns. `True` puts ours in its place, until `unregister`.
    :return: The names that are ours now, such as `"ntops.torch.gated_rms_norm"`.
    :raises ModuleNotFoundError: If ntops is not installed.
    :raises RuntimeError: If what is imported as ntops has no such lists. Nothing is changed
        then.
    """

    members = _members()

    for (package_name, name), (package, value) in members.items():
        key = (package, name)
        previous = vars(package).get(name, _ABSENT)

        if previous is value or (previous is _ABSENT and _is_listed_by_us(key)):
            if key in _entries:
                # The list may be a new one, where the package was reloaded.
                _entries[key].add()

            continue

        is_taken = previous is not _ABSENT or name in package.__all__

        if is_taken and not replace:
            warnings.warn(
                f"{package.__name__} has a {name} of its own, which stays;"
                f" `ntops_ext.{package_name}.{name}` is ours. `register(replace=True)` puts ours"
                f" in its place.",
                RuntimeWarning,
                stacklevel=2,
            )

            continue

        _entries[key] = _Entry(
            package=package,
            name=name,
            value=value,
            previous=previous,
            was_listed=name in package.__all__,
        )
        _entries[key].add()

    return tuple(
        f"{package.__name__}.{name}"
        for (_, name), (package, value) in members.items()
        if vars(package).get(name) is value
    )


def unregister() -> None:
    """Undo `register`: what was there before is there again.

    What somebody else has put under one of the names since then is left.
    """

    while _entries:
        _, entry = _entries.popitem()
        entry.remove()


def _is_listed_by_us(key):
    return key in _entries and not _entries[key].was_listed


def _members():
    """Ours, by the package's and their own name: the package of ntops and the value."""

    try:
        importlib.import_module("ntops")
    except ModuleNotFoundError as error:
        if error.name != "ntops":
            raise

        raise ModuleNotFoundError(
            "`register` adds the operators to ntops, but ntops is not installed. Without it"
            " they are in `ntops_ext.torch` and `ntops_ext.kernels`.",
            name="ntops",
        ) from error

    ntops = {
        name: importlib.import_module(f"ntops.{name}") for name in ("kernels", "torch")
    }

    for package in ntops.values():
        if not isinstance(getattr(package, "__all__", None), list):
            raise RuntimeError(
                f"`register` adds names to the list `{package.__name__}.__all__`, but"
                f" {package!r} has no such list: this is not an ntops that it knows."
            )

    ours = {
        name: importlib.import_module(f"ntops_ext.{name}")
        for name in ("kernels", "torch")
    }

    return {
        (package_name, name): (ntops[package_name], getattr(package, name))
        for package_name, package in ours.items()
        for name in package.__all__
        if name not in _QUESTIONS
    }
