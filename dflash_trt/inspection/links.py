"""Files of a checkpoint that are links to somewhere else, as those in a Hugging Face cache are."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_trt.errors import access


def links_outside(directory: Path) -> dict[str, list[str]]:
    """Names of the files in a directory that are links out of it, by the directory that the linked file lies in.

    Raises:
        UserError: the directory cannot be read.
    """
    here = Path(os.path.realpath(directory))
    found: dict[str, list[str]] = {}
    with access(directory, "read"):
        for file in sorted(directory.iterdir()) if directory.is_dir() else ():
            place = Path(os.path.realpath(file))
            if file.is_symlink() and place.is_file() and here not in place.parents:
                found.setdefault(str(place.parent), []).append(file.name)
    return found
