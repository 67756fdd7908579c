"""Locks for what may be interrupted: by a fork, and by a finalizer or a signal handler that calls again."""

import contextlib
import os
import threading


class ProcessLock:
    """A re-entrant lock. In a forked child no thread holds it, whoever held it in the parent.

    The thread that would release it there does not exist in the child.
    """

    def __init__(self):
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self):
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self):
        """Hold the lock for the block's duration."""

        # A thread that forks within the block leaves it in the child, too: by the lock that it took.
        with self._lock:
            yield


class _Thread(threading.local):
    is_in_a_call = False


_THREAD = _Thread()


class CallLock:
    """A re-entrant lock that is held for the length of a call."""

    def __init__(self):
        self._lock = threading.RLock()

    def run(self, function, *arguments):
        """What `function(*arguments)` returns, called while the lock is held."""

        # No context manager: every call that makes a plan would start and end a generator for it.
        with self._lock:
            outer = _THREAD.is_in_a_call

            try:
                _THREAD.is_in_a_call = True

                return function(*arguments)
            finally:
                _THREAD.is_in_a_call = outer


def is_in_a_call():
    """Whether this thread holds any `CallLock`."""

    return _THREAD.is_in_a_call


def is_held_here(lock):
    """Whether this thread holds `lock`, a `threading.RLock`."""

    # `threading.Condition` asks the same of a lock that it is given.
    return lock._is_owned()
