"""Stand-ins for the CUDA libraries that a CUDA build of PyTorch cannot be imported without.

A build of PyTorch for NVIDIA's GPUs names some gigabytes of libraries that its import loads and
that nothing calls where there is no GPU. For each of them this makes an empty one, in which every
function that PyTorch names returns "no device": enough to test what runs on the CPU.

    python scripts/stand_in_cuda.py SITE_PACKAGES

`readelf` and `cc` have to be installed.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

# The names of CUDA's functions; those of PyTorch are C++'s and start with an underscore and a Z.
_FUNCTION = re.compile(r"(?:__)?(?:cu|nccl|nv)\w*")

# Not the driver's `libcuda`, which is loaded only where there is one.
_LIBRARY = re.compile(r"lib(?!cuda\.)(?:cu|nccl|nv)[\w-]*\.so[\w.]*")

# What CUDA's runtime calls `cudaErrorNoDevice`; to the other libraries it is an error, too.
NO_DEVICE = 100


def make_stand_ins(site_packages):
    """Put the libraries that PyTorch lacks in the folder of its own.

    :param site_packages: The folder that `torch` is installed in.
    :return: Their names.
    """

    folder = pathlib.Path(site_packages) / "torch" / "lib"
    libraries, functions = set(), {}

    for path in sorted(folder.glob("*.so*")):
        printed = _readelf("--dynamic", "--version-info", "--dyn-syms", path)
        libraries |= set(
            re.findall(rf"\(NEEDED\).*\[({_LIBRARY.pattern})\]", printed)
        ) - {path.name for path in folder.iterdir()}
        owners = _owners_of_versions(printed)

        for name, version in re.findall(
            rf" UND ({_FUNCTION.pattern})(?:@(\S+))?", printed
        ):
            functions.setdefault(owners.get(version), {}).setdefault(
                version, set()
            ).add(name)

    # Functions without a version may be in any library: each of the process is searched.
    unversioned = functions.pop(None, {}).get("", set())

    for number, library in enumerate(sorted(libraries)):
        versions = functions.get(library, {})
        _compile(
            folder / library, versions, unversioned if number == 0 else frozenset()
        )

    return sorted(libraries)


def _owners_of_versions(printed):
    """The library that each version of a symbol is asked of."""

    owners = {}
    library = None

    for file, version in re.findall(
        r"Version: 1  File: (\S+)|  Name: (\S+)  Flags:", printed
    ):
        library = file or library

        if version and _LIBRARY.fullmatch(library or ""):
            owners[version] = library

    return owners


def _compile(path, versions, unversioned):
    names = sorted(unversioned.union(*versions.values()))
    source = "".join(map(_define, names))
    script = "".join(
        f"{version} {{ global: {'; '.join(sorted(of_version))}; }};\n"
        for version, of_version in versions.items()
    )

    with tempfile.TemporaryDirectory() as folder:
        source_file = pathlib.Path(folder, "functions.c")
        source_file.write_text(source)
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", source_file]

        if versions:
            script_file = pathlib.Path(folder, "versions")
            script_file.write_text(script)
            command.append(f"-Wl,--version-script={script_file}")

        subprocess.run([*command, f"-Wl,-soname,{path.name}", "-o", path], check=True)


def _define(name):
    """A function in C: most return a status, the others what a status means."""

    if name.endswith(("ErrorName", "ErrorString", "GetString")):
        return f'const char *{name}(void) {{ return "no device"; }}\n'

    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"


def _readelf(*arguments):
    return subprocess.run(
        ["readelf", "--wide", *arguments], check=True, capture_output=True, text=True
    ).stdout


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("site_packages", type=pathlib.Path)
    options = parser.parse_args(arguments)
    print(*make_stand_ins(options.site_packages), sep="\n")

    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
