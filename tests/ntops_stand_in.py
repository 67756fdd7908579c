"""What stands in for ntops: its two packages, each with a list of names."""

import sys
import types

PACKAGES = ("ntops.kernels", "ntops.torch")


def make_ntops(monkeypatch, **members):
    """A package that is imported as ntops, with one operator and the members given."""

    packages = {name: types.ModuleType(name) for name in ("ntops", *PACKAGES)}

    for name in PACKAGES:
        setattr(packages["ntops"], name.removeprefix("ntops."), packages[name])
        packages[name].add = object()
        packages[name].__all__ = ["add"]

    for name, value in members.items():
        packages["ntops.torch"].__all__.append(name)
        setattr(packages["ntops.torch"], name, value)

    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)

    return packages["ntops"]
