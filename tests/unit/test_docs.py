"""The README's service table says what `contracts.subjects` says."""

import re
from pathlib import Path

from contracts.subjects import CHANNELS

ROOT = Path(__file__).parents[2]


def service_table() -> dict[str, tuple[set[str], set[str], list[str]]]:
    """Service -> subjects it hears, subjects it says, files it decides in."""
    rows = {}
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`python -m"):
            heard, said = (set(re.findall(r"`([^`]+)`", cell)) for cell in cells[2:4])
            rows[cells[0]] = (heard, said, re.findall(r"\]\(([^)]+)\)", cells[4]))
    return rows


def test_the_service_table_names_who_hears_and_says_what() -> None:
    services = {service for channel in CHANNELS for service in (*channel.said_by, *channel.heard_by)}
    assert service_table().keys() == services
    for service, (heard, said, _) in service_table().items():
        assert heard == {c.pattern for c in CHANNELS if service in c.heard_by}, f"{service} hears"
        assert said == {c.pattern for c in CHANNELS if service in c.said_by}, f"{service} says"


def test_every_file_that_a_document_links_to_exists() -> None:
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{document.name} links to {target}"
