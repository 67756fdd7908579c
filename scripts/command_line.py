"""The options that the scripts have in common, read before anything imports Triton."""

import argparse
import fnmatch
import os
import pathlib
import sys

import torch


def make_smoke_parser(documentation):
    """A parser with `--device` alone, described by a script's docstring."""

    parser = argparse.ArgumentParser(description=documentation.partition("\n\n")[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")

    return parser


def make_parser(documentation):
    """The same with `--quick` and `--output`."""

    parser = make_smoke_parser(documentation)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases and rounds: under 2 minutes on a GPU",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="FILE.jsonl", help="for the records"
    )

    return parser


def parse(parser, arguments, *, interpret=True):
    """The options, with a device that is there.

    :param interpret: Whether kernels run in Triton's interpreter on a CPU. Triton reads that
        when it is imported, so no script may have imported it by now.
    """

    options = parser.parse_args(arguments)

    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"

    if options.device == "cuda":
        require_gpu(parser, "--device cuda")

    if options.device == "cpu" and interpret:
        is_too_late = "triton" in sys.modules
        assert not is_too_late or os.environ.get("TRITON_INTERPRET") == "1"
        os.environ["TRITON_INTERPRET"] = "1"

    return options


def require_gpu(parser, argument):
    """End with a message where there is no GPU for what an argument asks for."""

    if not torch.cuda.is_available():
        parser.error(f"{argument}: PyTorch finds no CUDA or ROCm device here")


def choose_cases(parser, options, cases):
    """The cases that a pattern of `options.cases` matches, all where it is None.

    :param cases: Pairs of a name and a case, as `options.device` and `options.quick` leave them.
    """

    if options.cases is None:
        return [case for _, case in cases]

    for pattern in options.cases:
        if not any(matches(name, [pattern]) for name, _ in cases):
            parser.error(
                f"--cases: no case is named {pattern}; with --device {options.device}"
                f"{' --quick' * options.quick} there are"
                f" {', '.join(name for name, _ in cases)}"
            )

    return [case for name, case in cases if matches(name, options.cases)]


def matches(name, patterns):
    """Whether one of the patterns is of this name."""

    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parse_host_options(parser, arguments):
    """The options of a script that times calls on the host, with its rounds and calls.

    Where there is no GPU, nothing is interpreted: launches do nothing.
    """

    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int, help="a round")
    options = parse(parser, arguments, interpret=False)
    is_tiny = options.quick and options.device == "cpu"
    options.rounds = options.rounds or (2 if is_tiny else 9 if options.quick else 25)
    options.calls = options.calls or (8 if is_tiny else 400)

    return options


def progress(steps, unit):
    """The same steps, with a bar where somebody looks on and tqdm is installed."""

    if not sys.stderr.isatty():
        return steps

    try:
        from tqdm import tqdm
    except ImportError:
        return steps

    return tqdm(steps, unit=unit)
