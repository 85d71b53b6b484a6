"""An extension of Griffe for `make docs`: a function that has a package's name is documented.

`logmirror.verify` is a function of the public API, and `src/logmirror/verify` a package. Griffe
shows the package; for a name in `__all__`, this extension shows what `__init__.py` imports.
"""
# ruff: noqa: INP001  # loaded by its path

from __future__ import annotations

import griffe


class PublicNames(griffe.Extension):
    """Replaces packages by the names of the public API that they hide."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Replace members of the package `pkg`, once it is loaded."""
        for name in pkg.exports or ():
            if name in pkg.imports and pkg.members[str(name)].is_module:
                pkg[str(name)] = griffe.Alias(str(name), pkg.imports[str(name)], parent=pkg)
