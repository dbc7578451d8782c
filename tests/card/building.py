"""The library of the emulated card: whether it can be made here, and where it is."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("card.cpp")
BUILDS = SOURCE.parents[2] / "build"


def torch_folder() -> Path | None:
    """Where torch is, unless it is one for real cards."""
    spec = find_spec("torch")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder is None or (folder / "lib" / "libtorch_cuda.so").exists():
        return None
    return folder


def why_not() -> str:
    """What is missing here; nothing is ``""``."""
    if shutil.which("g++") is None:
        return "there is no g++"
    return "" if torch_folder() is not None else "torch is not a build for the CPU alone"


def built() -> Path:
    """The library, compiled if it has not been. Raises ``RuntimeError`` where it cannot be."""
    folder = torch_folder()
    if folder is None:
        raise RuntimeError(why_not())
    made_of = SOURCE.read_bytes() + (folder / "version.py").read_bytes() + bytes(folder)  # whose path is in it
    key = hashlib.sha256(made_of).hexdigest()[:16]
    library = BUILDS / f"card-{key}.so"
    if not library.exists():
        BUILDS.mkdir(exist_ok=True)
        made = library.with_suffix(f".{threading.get_native_id()}")
        include = [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include"]
        link = [f"-L{folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}/lib"]
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(made), *link]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr[-2000:]}")
        made.rename(library)
    return library
