"""Generated sources in a folder that processes share: written whole, and never executed unchecked.

NineToothed names a source by its SHA-256. It writes it in place, and takes any file of that name for the whole of it: so a
process may read what another has half written, or was stopped in.
"""

import contextlib
import linecache
import os
import pathlib
import sys
import types
import uuid

from ninetoothed_patches.errors import SourceFolderError


def import_ninetoothed():
    """Import NineToothed, which makes its folder `~/.ninetoothed` then.

    :raises SourceFolderError: If it cannot make it.
    """

    try:
        import ninetoothed
    except OSError as error:
        raise _unusable(pathlib.Path.home() / ".ninetoothed", error) from error

    return ninetoothed


def keep(path, source):
    """Let the file be this source, if it is not yet.

    It is replaced, never written to: another process sees the whole of it or what was there before.

    :raises SourceFolderError: If it is not this source and cannot be replaced.
    """

    content = source.encode("utf-8")

    try:
        if path.exists() and path.read_bytes() == content:
            return

        unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")

        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                unfinished.unlink()

            raise
    except OSError as error:
        raise _unusable(path.parent, error) from error


def load(name, path, source):
    """The module that `source` is, as if it were imported from the file that holds it.

    What is executed is `source`: neither the file, which may have changed since, nor bytecode that lies beside it. Triton
    asks `inspect` for the source of a kernel, and gets this one, too.
    """

    module = types.ModuleType(name)
    module.__file__ = path
    # Without a time of modification an entry is not compared with the file.
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    sys.modules[name] = module
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))

    return module


def name_triton_cache(error):
    """The error to raise in the place of an OSError of a compilation: if it is about Triton's cache, it says so.

    :return: `error` itself where it is about something else.
    """

    folder = os.environ.get("TRITON_CACHE_DIR", "").strip() or os.path.join(
        os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache"
    )

    if not str(error.filename).startswith(folder):
        return error

    return OSError(
        error.errno,
        f"{error.strerror}; Triton keeps compiled kernels in a cache: set the environment variable TRITON_CACHE_DIR to a"
        f" writable folder",
        error.filename,
    )


def _unusable(folder, error):
    return SourceFolderError(
        f"NineToothed cannot use the folder {folder} that it keeps its generated kernels in ({error}). Set the environment"
        f" variable HOME to a writable folder before the first kernel is used."
    )
