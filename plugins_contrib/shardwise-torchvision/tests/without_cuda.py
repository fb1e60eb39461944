"""torchvision's own kernels for CPU, also from a wheel that was built for a CUDA that this machine lacks.

Such a wheel's library does not load, because the CUDA libraries that it names are not there, though nothing of them is
called for tensors on a CPU. Empty ones stand in for them: every function that the library expects of them is there and
returns zero.
"""

import atexit
import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import torch


def library():
    (folder,) = importlib.util.find_spec("torchvision").submodule_search_locations
    return Path(folder) / "_C.so"


def prepare():
    """Let this process and those that it starts load torchvision's library; call it before they import torchvision."""
    try:
        torch.ops.load_library(library())
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="without-cuda-"))
        atexit.register(_remove, folder, os.getpid())
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
        for built in stand_ins(library(), folder, error):
            ctypes.CDLL(str(built))
        torch.ops.load_library(library())


def _remove(folder, process):
    """At the end of the process that built them: those that it starts have the folder from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def stand_ins(of, folder, error):
    """Build the CUDA libraries that a library names, with all that it expects of them."""
    tools = {name: shutil.which(name) for name in ("cc", "nm", "readelf")}
    if None in tools.values():
        raise RuntimeError(
            f"{of} does not load ({error}), and stand-ins for CUDA need {', '.join(tools)}. Install them, or a "
            "torchvision that is built as torch is."
        ) from error
    dynamic = _lines(tools["readelf"], "--dynamic", of)
    needed = [line.partition("[")[2].rstrip("]") for line in dynamic if "(NEEDED)" in line]
    cuda = [name for name in needed if "cuda" in name]
    symbols = defaultdict(list)
    for line in _lines(tools["nm"], "--dynamic", "--undefined-only", of):
        name, _, version = line.split()[-1].partition("@")
        if "cuda" in name:  # what torch itself lacks, and the runtime's functions, which have a version
            symbols[version or cuda[-1]].append(name)
    return [_build(tools["cc"], folder, name, symbols[name]) for name in cuda]


def _lines(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _build(compiler, folder, name, symbols):
    source, versions, built = folder / f"{name}.c", folder / f"{name}.map", folder / name
    # A pointer for data, too: zero, as the functions return.
    source.write_text("\n".join(f"void *{symbol}(void) {{ return 0; }}" for symbol in symbols))
    versions.write_text(f"{name} {{ global: *; }};\n")
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"]
    subprocess.run([compiler, *options, str(source), "-o", str(built)], check=True)
    return built
