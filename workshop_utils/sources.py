"""Tell checkouts of the workshop apart, which all have the same version."""

import hashlib
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGES = {"daskrun": "daskrun", "workshop-dask-pytorch": "workshop_utils"}  # by distribution


@cache  # the code that this process has imported stays as it is when its file changes
def source_versions() -> dict[str, str]:
    """Return each distribution's version with a digest of its Python files, such as "0.1.0+954f6072".

    It's that of the files when this process first asked, which takes about 10 ms.
    """
    versions = {}
    for distribution, name in PACKAGES.items():
        digest, package = hashlib.sha256(), import_module(name)
        folder = Path(package.__path__[0])
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        for file in sorted(files):
            if not file.startswith(".") and "/." not in file:  # JupyterLab keeps copies in .ipynb_checkpoints
                content = files[file].read_bytes().replace(b"\r\n", b"\n")  # git may have changed line ends
                digest.update(f"{file} {len(content)}\n".encode() + content)
        versions[distribution] = f"{package.__version__}+{digest.hexdigest()[:8]}"
    return versions
