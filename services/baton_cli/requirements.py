"""Checks the versions of installed packages before a service imports them."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from baton_cli.errors import UserError


def check_versions(*extras: str) -> None:
    """Raise UserError if an installed package is older than a service needs. extras: its optional dependencies.

    Otherwise an old version of a package would fail later, at the first name that it does not have. Packages that are
    not installed are left to their imports.
    """
    try:
        lines = requires("baton") or []
    except PackageNotFoundError:
        return  # Baton runs from its source tree
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        floors = [each for each in requirement.specifier if each.operator == ">="]
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        for floor in floors:
            if not floor.contains(installed, prereleases=True):
                raise UserError(
                    f"{requirement.name} {installed} is installed, but Baton needs {requirement.name}{floor}: "
                    f"pip install '{requirement.name}{requirement.specifier}'"
                )
