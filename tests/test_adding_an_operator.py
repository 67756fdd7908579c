"""docs/adding_an_operator.md, followed: its files are added to a copy of the package, and its test runs."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding_an_operator.md"

# What a line before a block names: a file, and whether the block is added to it.
FILE = re.compile(r"^`([\w/.]+)`(, at the end)?:\n\n```python\n(.*?)^```", re.M | re.S)


def add_name(path, anchor, *lines):
    """Put lines behind the last one that begins with `anchor`."""

    head, found, tail = path.read_text().rpartition(anchor)

    assert found, f"{path} has no {anchor!r}"

    line, _, rest = tail.partition("\n")
    path.write_text("\n".join([head + found + line, *lines, rest]))


def test_the_page_makes_an_operator(tmp_path):
    """Each block goes where the page says, each list gets its name, and the operator's own test passes."""

    for name in ("ntops_ext", "ninetoothed_patches", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)

    for path, is_added, block in FILE.findall(PAGE.read_text()):
        file = tmp_path / path
        text = file.read_text() + "\n\n" if is_added else ""
        file.write_text(text + block)

    kernels = tmp_path / "ntops_ext" / "kernels" / "__init__.py"
    add_name(kernels, "import (", "    silu_mul,")
    add_name(kernels, "__all__ = [", '    "silu_mul",')
    functions = tmp_path / "ntops_ext" / "torch" / "__init__.py"
    add_name(
        functions,
        "from ntops_ext.torch.",
        "from ntops_ext.torch.silu_mul import silu_mul",
    )
    functions.write_text(
        functions.read_text().replace("__all__ = [", '__all__ = ["silu_mul", ')
    )
    compiled = tmp_path / "ntops_ext" / "torch" / "_compiled.py"
    add_name(compiled, "from ntops_ext.torch import (", "    _silu_mul,")

    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", tmp_path),
            *("--doctest-modules", "tests/interpreted/test_silu_mul.py"),
            "ntops_ext/torch/silu_mul.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 passed" in result.stdout
