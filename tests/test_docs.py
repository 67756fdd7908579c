"""The examples of README.md and docs/: each `python` block runs, as it is written, on a CPU."""

import doctest
import pathlib
import re

import pytest
import torch
from ntops_stand_in import make_ntops

ROOT = pathlib.Path(__file__).resolve().parent.parent

PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")))


def examples(page):
    """The `python` blocks of a page."""

    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


# Its blocks are files: tests/test_adding_an_operator.py has them.
NO_PROGRAM = "docs/adding_an_operator.md"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page) and page != NO_PROGRAM]
)
def test_examples(page, monkeypatch):
    """The blocks of a page are one program."""

    make_ntops(monkeypatch)
    # README's example uses a GPU if there is one; the tests of a GPU are others.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scope = {"__name__": page}

    for example in examples(page):
        exec(compile(example, page, "exec"), scope)


@pytest.mark.parametrize("page", [page for page in PAGES if page != NO_PROGRAM])
def test_sessions(page):
    """What a session shows is what it gives."""

    results = doctest.testfile(str(ROOT / page), module_relative=False)

    assert results.failed == 0


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_pages_are_in_the_readme(page):
    """A reader finds every page from there."""

    assert page in (ROOT / "README.md").read_text()
