"""What a result was made with: printed by every script, kept in every record."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent

PACKAGES = ("triton", "ninetoothed", "ntops-ext")


def describe_environment():
    """A dict of strings: versions, machine, commit, date."""

    environment = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "commit": _commit(),
        # With the build, which the distribution's version leaves out.
        "torch": torch.__version__,
    }

    for package in PACKAGES:
        try:
            environment[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            environment[package] = "not installed"

    if torch.cuda.is_available():
        environment["gpu"] = torch.cuda.get_device_name()
        environment["driver"] = _driver()
    else:
        environment["gpu"] = "none"

    return environment


def print_environment(environment):
    for name, value in environment.items():
        print(f"{name}: {value}")

    print(flush=True)


def _commit():
    # A copy of the sources without their history can be told which commit it is.
    return os.environ.get("SOURCE_COMMIT") or _output(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    )


def _driver():
    return _output(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    )


def _output(command):
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

    return result.stdout.splitlines()[0].strip()
