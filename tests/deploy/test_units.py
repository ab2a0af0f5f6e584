"""Units for systemd: closed, and for commands that there are."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("unit", ["fedvlm-server", "fedvlm-site@"])
def test_a_unit_is_closed_and_starts_what_there_is(unit):
    lines = (ROOT / "units" / f"{unit}.service").read_text().splitlines()
    for wanted in (
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "User=fedvlm",
        "UMask=0077",
    ):
        assert wanted in lines
    [start] = [line for line in lines if line.startswith("ExecStart=")]
    assert start.split()[1:3] == ["deploy", unit.removeprefix("fedvlm-").removesuffix("@")]
