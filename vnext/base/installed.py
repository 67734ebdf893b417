"""Installed packages: what they offer vnext as entry points. It runs as the user's own code: no request or checkpoint names one."""

from __future__ import annotations


class InstalledError(ValueError):
    """Something installed that cannot be used. The message is one sentence with its name and the remedy."""


class NotOffered(InstalledError):
    """No installed package has it."""


def first_line(error: BaseException) -> str:
    """Of what a package's code has raised, with the second one behind a colon, and without a full stop."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join((first, *others[: first.endswith(":")])).rstrip(".")


def load_entry(group: str, name: str, what: str) -> object:
    """What an installed package has in a group under a name; `what` it is, in a word. Raises InstalledError."""
    from importlib.metadata import entry_points

    points = entry_points(group=group)
    for point in points.select(name=name):
        try:
            return point.load()
        except Exception as error:  # a package's code may raise anything
            of, why = f" of {point.dist.name}" if point.dist else "", f"{type(error).__name__}: {first_line(error)}"
            raise InstalledError(f"the {what} {name}{of} cannot be imported ({why})") from error
    known = ", ".join(sorted({point.name for point in points})) or "none"
    raise NotOffered(f"no installed package offers the {what} {name!r} as an entry point of {group}; there are: {known}")
