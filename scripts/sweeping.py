"""What the scripts that time every launch choice have in common."""

import multiprocessing

from command_line import progress


def compile_ahead(compile_choice, jobs):
    """Call `compile_choice(*job)` for each of `jobs`, in as many processes as there are cores.

    Triton keeps what they compile on disk, for this process to find.
    """

    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(compile_choice, jobs, chunksize=1)


def measure_all(shapes, measure, print_best):
    """Yield the records of each shape, whose best are printed before the next is measured."""

    for shape in progress(shapes, "shape"):
        records = measure(shape)
        print_best(shape, records)

        yield from records
