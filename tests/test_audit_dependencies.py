"""The audit against advisories on disk finds what concerns a locked version, and nothing else."""

import json

import pytest
from audit_dependencies import audit, concerns

LOCK = """
version = 1

[[package]]
name = "some-server"
version = "3.7.3"
source = { registry = "https://example.org/simple" }

[[package]]
name = "other"
version = "2.0"
source = { registry = "https://example.org/simple" }
"""
YAML = """
id: PYSEC-1
details: Open redirect.
affected:
- package: {name: Some_Server, ecosystem: PyPI}
  ranges:
  - type: ECOSYSTEM
    events:
    - introduced: "0"
    - fixed: 3.7.4
"""


def test_only_advisories_on_locked_versions_are_told(tmp_path):
    (tmp_path / "uv.lock").write_text(LOCK)
    advisories = tmp_path / "advisories"
    advisories.mkdir()
    (advisories / "one.yaml").write_text(YAML)
    (advisories / "mended.yaml").write_text(YAML.replace("3.7.4", "3.7.3"))
    (advisories / "withdrawn.yaml").write_text(YAML + 'withdrawn: "2024-01-01T00:00:00Z"\n')
    package = {"name": "other", "ecosystem": "PyPI"}
    listed = {"id": "GHSA-2", "affected": [{"package": package, "versions": ["1.9", "2.0"]}]}
    (advisories / "two.json").write_text(json.dumps(listed))
    foreign = {**package, "ecosystem": "npm"}
    text = json.dumps({"id": "GHSA-3", "affected": [{"package": foreign, "versions": ["2.0"]}]})
    (advisories / "three.json").write_text(text)
    found, compared = audit(advisories, tmp_path / "uv.lock")
    assert [line.split()[:3] for line in found] == [
        ["some-server", "3.7.3:", "PYSEC-1"],
        ["other", "2.0:", "GHSA-2"],
    ]
    assert compared == 3


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.9", False), ("1.0", True), ("1.5", False), ("2.1", True), ("2.2", True), ("2.3", False)],
)
def test_ranges_open_and_close(version, inside):
    events = [{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.1"}]
    events.append({"last_affected": "2.2"})
    assert concerns({"ranges": [{"type": "ECOSYSTEM", "events": events}]}, version) == inside
