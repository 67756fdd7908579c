"""The package: what it exports, what its import costs and needs."""

import importlib
import json
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import ntops_ext
import ntops_ext.kernels
import ntops_ext.torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(code, **environment):
    """The last line that a fresh interpreter prints, as JSON."""

    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_INTERPRET": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr

    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", [ntops_ext, ntops_ext.torch, ntops_ext.kernels])
def test_export_lists_are_sorted_and_resolve(package):
    """Each name once, and each can be imported."""

    assert package.__all__ == sorted(set(package.__all__))

    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", [ntops_ext.torch, ntops_ext.kernels])
def test_export_lists_are_complete(package):
    """Each public module of a package is an operator, and is listed."""

    modules = [
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    ]

    assert package.__all__ == sorted(modules)


def test_each_operator_is_a_plain_function_of_its_own_module():
    """Its module's global `torch` may be replaced: nothing else there would notice."""

    for name in ntops_ext.torch.__all__:
        operator = getattr(ntops_ext.torch, name)
        module = sys.modules[f"ntops_ext.torch.{name}"]

        assert operator.__globals__ is vars(module)
        assert not hasattr(operator, "__wrapped__")
        assert operator.__name__ == name


def test_kernels_do_not_import_torch():
    """Kernels are NineToothed's; what a user calls is PyTorch's."""

    for module in pkgutil.iter_modules(ntops_ext.kernels.__path__):
        source = importlib.import_module(f"ntops_ext.kernels.{module.name}")

        assert "torch" not in vars(source), module.name


def test_an_unknown_attribute():
    """Parts are imported when they are used, others do not exist."""

    with pytest.raises(AttributeError, match="'ntops_ext'.*'kernel'"):
        _ = ntops_ext.kernel

    assert set(ntops_ext.__all__) <= set(dir(ntops_ext))


@pytest.mark.parametrize(
    "name", sorted({*ntops_ext.__all__} - {"register", "unregister"})
)
def test_each_part_is_there_without_being_imported(name):
    """In a process that has imported nothing but the package."""

    found = run(f"import json, ntops_ext\nprint(json.dumps(ntops_ext.{name}.__name__))")

    assert found == f"ntops_ext.{name}"


def test_the_import_needs_nothing():
    """Neither NineToothed, nor Triton, nor ntops, nor torch is imported by it."""

    heavy = run(
        "import json, sys, ntops_ext\n"
        "print(json.dumps(sorted({'ninetoothed', 'ntops', 'torch', 'triton'}"
        " & set(sys.modules))))"
    )

    assert heavy == []


def test_operators_need_neither_ninetoothed_nor_ntops_on_import():
    """They are imported with the first kernel."""

    heavy = run(
        "import json, sys, torch\n"
        "from ntops_ext.torch import gated_rms_norm\n"
        "gated_rms_norm(torch.ones(2, 8))\n"
        "print(json.dumps(sorted({'ninetoothed', 'ntops'} & set(sys.modules))))"
    )

    assert heavy == []


def test_no_call_imports_pytorchs_compiler():
    """Dynamo takes long to import, and no call that is not compiled needs it."""

    compilers = run(
        "import json, sys; sys.path.insert(0, 'tests')\n"
        "import torch, ntops_ext.torch\n"
        "from recording_driver import recording\n"
        "from ntops_ext.torch import _launch\n"
        "_launch.runs_kernel = lambda tensor: True\n"
        "x = torch.ones(2, 64, requires_grad=True)\n"
        "with recording() as driver:\n"
        "    ntops_ext.torch.gated_rms_norm(x, gate=x).backward(x)\n"
        "    assert driver.take()\n"
        "print(json.dumps(sorted({'torch._dynamo', 'torch._inductor'} & set(sys.modules))))"
    )

    assert compilers == []


@pytest.fixture(params=["absent", "a_file"])
def unusable_home(request, tmp_path):
    """A home in which no folder can be made, not by the root user either."""

    if request.param == "absent":
        return "/proc/nonexistent"

    home = tmp_path / "home"
    home.write_text("not a folder")

    return str(home)


def test_a_home_that_cannot_be_written_to(unusable_home):
    """The definition works there; the first kernel says what is missing and what helps."""

    message = run(
        "import json, torch, ntops_ext\n"
        "from ntops_ext import _handles\n"
        "from ntops_ext.torch import gated_rms_norm\n"
        "gated_rms_norm(torch.ones(2, 8))\n"
        "try:\n"
        "    _handles.import_kernels()\n"
        "except RuntimeError as error:\n"
        "    print(json.dumps(str(error)))\n",
        HOME=unusable_home,
    )

    assert f"{unusable_home}/.ninetoothed" in message
    assert "HOME" in message


def test_the_interpreter_in_such_a_home(unusable_home):
    """The error is the same where a call of the operator needs the kernel."""

    message = run(
        "import json, torch\n"
        "from ntops_ext.torch import gated_rms_norm\n"
        "out = torch.full((2, 8), 7.0)\n"
        "try:\n"
        "    gated_rms_norm(torch.ones(2, 8), out=out)\n"
        "except RuntimeError as error:\n"
        "    assert (out == 7).all()\n"
        "    print(json.dumps(str(error)))\n",
        HOME=unusable_home,
        TRITON_INTERPRET="1",
    )

    assert "HOME" in message


def test_the_version_is_that_of_the_distribution():
    """One number, in two places."""

    project = (ROOT / "pyproject.toml").read_text()

    assert f'version = "{ntops_ext.__version__}"' in project
