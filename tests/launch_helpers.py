"""What the tests of launch plans share: a planned handle beside its unpatched twin."""

import contextlib
import itertools

import launch_kernels
import torch

import ninetoothed_patches


class Pair:
    """A planned handle, and a twin of it without plans: the oracle.

    :param name: A kernel of `launch_kernels`.
    :param driver: The recording driver that is active.
    """

    def __init__(self, name, driver, **options):
        self._driver = driver
        self.twin = getattr(launch_kernels, name)()
        self.planned = ninetoothed_patches.planned(
            getattr(launch_kernels, name)(), **options
        )

    def call(self, *args, **kwargs):
        """Call both, assert that they do the same, and return the last record of the planned one (None if none)."""

        expected = outcome(self._driver, self.twin, *args, **kwargs)
        actual = outcome(self._driver, self.planned, *args, **kwargs)
        assert expected == actual

        return actual[0][-1] if actual[0] else None

    @property
    def info(self):
        return self.planned.cache_info()

    @property
    def counts(self):
        """Hits, misses, and all bypasses together."""

        info = self.info

        return info.hits, info.misses, sum(info.bypasses.values())


def outcome(driver, handle, *args, **kwargs):
    """What a call launched, and what it raised."""

    driver.clear()
    raised = None

    try:
        handle(*args, **kwargs)
    except Exception as error:
        raised = type(error), str(error)

    return driver.take(), raised


def tuner_of(handle):
    """The auto-tuner of a handle that has one."""

    return handle._launch.__globals__[f"{handle._kernel.__name__}_with_auto_tuning"]


def each_after_each(values):
    """An order in which each of some values comes after each of them, itself too: its plan is then compared with the call."""

    return [value for pair in itertools.product(values, repeat=2) for value in pair] * 2


def rows(count=8, *, dtype=torch.bfloat16, offset=0, stride=128):
    """[count, 128], `offset` elements into an allocation that is aligned to 64 bytes or more."""

    buffer = torch.zeros(count * stride + offset, dtype=dtype)

    return buffer[offset:].as_strided((count, 128), (stride, 1), offset)


def vector(count=1000, *, dtype=torch.bfloat16):
    return torch.zeros(count, dtype=dtype)


@contextlib.contextmanager
def applied(**options):
    """The patch, for the block's duration."""

    assert ninetoothed_patches.apply(**options)

    try:
        yield
    finally:
        ninetoothed_patches.revert()
