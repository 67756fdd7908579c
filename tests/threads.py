"""Threads that start together, for tests."""

import threading


def in_threads(count, function):
    """Run `function(index)` in threads that start together; return what they raised."""

    barrier, raised = threading.Barrier(count), []

    def run(index):
        try:
            barrier.wait()
            function(index)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]

    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    return raised
