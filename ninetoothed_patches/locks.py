"""A lock that a forked child finds free."""

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
