"""`longfill version`: what is installed. Imports nothing heavy; reads package metadata only."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from longfill import __version__
from longfill.cli.console import print_json
from longfill.cli.flags import JsonFlag

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def version(as_json: JsonFlag = False) -> int:
    """Print the versions of longfill and of what it computes with."""
    versions = {"longfill": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if as_json:
        print_json(versions)
    else:
        for name, number in versions.items():
            print(f"{name} {number}")
    return 0
