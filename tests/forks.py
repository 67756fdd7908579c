"""Forked processes that start together, for programs of tests."""

import multiprocessing

_PROCESSES = multiprocessing.get_context("fork")


def in_forks(count, function, timeout):
    """What `function()` returns in each of so many forks of this process, or the `repr` of what it raised.

    :param timeout: How many seconds each may take.
    """

    barrier, results = _PROCESSES.Barrier(count), _PROCESSES.Queue()

    def run():
        try:
            barrier.wait(30)
            results.put(function())
        except BaseException as error:
            results.put(repr(error))

    workers = [_PROCESSES.Process(target=run) for _ in range(count)]

    for worker in workers:
        worker.start()

    answers = [results.get(timeout=timeout) for _ in workers]

    for worker in workers:
        worker.join(30)

    return answers
