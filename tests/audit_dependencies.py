"""Look the locked dependencies up in an advisory database on disk, for where no network is.

    git clone https://github.com/pypa/advisory-database    # or github/advisory-database
    uv run python tests/audit_dependencies.py advisory-database

reads advisories in OSV's form, YAML or JSON, and prints those that concern a version of uv.lock.
Ends with status 1 when there is one. With a network `uvx pip-audit` and `uv audit` say the same.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

LOCK = pathlib.Path(__file__).parent.parent / "uv.lock"


def locked(lock: pathlib.Path) -> dict[str, set[str]]:
    """Give the versions of every package in a lock file."""
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        if "version" in package and "registry" in package["source"]:
            versions.setdefault(package["name"], set()).add(package["version"])
    return versions


def advisories(folder: pathlib.Path, names: set[str]) -> Iterator[dict[str, Any]]:
    """Read the advisories that name one of the packages and have not been withdrawn."""
    named = re.compile(r"""name["']?:\s*["']?([A-Za-z0-9._-]+)""")
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".yaml", ".json") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        if not {plain(name) for name in named.findall(text)} & names:
            continue
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        if isinstance(found, dict) and "affected" in found and not found.get("withdrawn"):
            yield found


def plain(name: str) -> str:
    """Write a package's name as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def concerns(affected: dict[str, Any], version: str) -> bool:
    """Say whether a version is among those that an advisory lists, or within its ranges."""
    if version in map(str, affected.get("versions", ())):
        return True
    at = Version(version)
    for span in affected.get("ranges", ()):
        inside = False
        if span["type"] != "ECOSYSTEM":
            continue
        for event in span["events"]:
            ((kind, bound),) = event.items()
            try:
                limit = Version("0" if bound == "0" else str(bound))
            except InvalidVersion:
                continue
            if kind == "introduced" and at >= limit:
                inside = True
            if (kind == "fixed" and at >= limit) or (kind == "last_affected" and at > limit):
                inside = False
        if inside:
            return True
    return False


def audit(folder: pathlib.Path, lock: pathlib.Path = LOCK) -> tuple[list[str], int]:
    """Give a line for each advisory that concerns a locked version, and how many were compared."""
    versions = locked(lock)
    found, compared = [], 0
    for advisory in advisories(folder, set(versions)):
        for affected in advisory["affected"]:
            package = affected.get("package", {})
            name = plain(package.get("name", ""))
            if package.get("ecosystem") != "PyPI" or name not in versions:
                continue
            compared += 1
            for version in sorted(versions[name]):
                if concerns(affected, version):
                    summary = advisory.get("summary") or advisory.get("details", "")
                    found.append(f"{name} {version}: {advisory['id']} {summary[:80]!r}")
    return found, compared


def main() -> None:
    """Audit against the folder that the command line names."""
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    found, compared = audit(pathlib.Path(sys.argv[1]))
    if not compared:
        raise SystemExit(f"{sys.argv[1]} holds no advisory on any locked package: wrong folder?")
    packages = locked(LOCK)
    print("\n".join(found) or "no known vulnerability")
    print(f"{len(packages)} packages, {compared} advisories on them compared")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
