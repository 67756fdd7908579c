"""What the scripts that time every launch choice have in common."""

import multiprocessing

import results
from command_line import progress
from environment import describe_environment, print_environment
from timing import NOT_MEANINGFUL


def sweep(options, shapes, choices, compile_choice, measure, print_best):
    """Write the records of each shape, and print its best before the next is measured.

    :param choices: A function of a shape: the launch choices that `measure` times.
    :param compile_choice: A function of a shape and a choice, for a process of its own.
    :param measure: A function of a shape and a device: the records.
    :param print_best: A function of a shape and its records.
    :return: The exit status.
    """

    environment = describe_environment()
    print_environment(environment)

    if options.device == "cpu":
        print(NOT_MEANINGFUL)
    else:
        jobs = [(shape, choice) for shape in shapes for choice in choices(shape)]

        # Triton keeps on disk what these processes compile, for this one to find.
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.starmap(compile_choice, jobs, chunksize=1)

    def measure_all():
        for shape in progress(shapes, "shape"):
            records = measure(shape, options.device)
            print_best(shape, records)

            yield from records

    results.write(options.output, measure_all(), environment)

    return 0
