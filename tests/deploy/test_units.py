"""Units for systemd: closed, and for commands that there are."""

import re
from pathlib import Path

import pytest
import yaml

from fedvlm.cli.deploy import deploy_app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("unit", ["fedvlm-server", "fedvlm-site@"])
def test_a_unit_is_closed_and_starts_what_there_is(unit):
    lines = (ROOT / "packaging" / "systemd" / f"{unit}.service").read_text().splitlines()
    for expected in (
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "User=fedvlm",
        "UMask=0077",
        "TasksMax=512",
    ):
        assert expected in lines
    assert any(re.fullmatch(r"MemoryMax=\dG", line) for line in lines)
    [start] = [line for line in lines if line.startswith("ExecStart=")]
    assert start.split()[1:3] == ["deploy", unit.removeprefix("fedvlm-").removesuffix("@")]


def test_the_compose_file_starts_what_there_is_and_opens_no_port():
    """`docker compose config` is not everywhere; what it reads is a table like any other."""
    compose = yaml.safe_load((ROOT / "packaging" / "docker" / "docker-compose.yml").read_text())
    commands = {command.name or command.callback.__name__ for command in deploy_app.registered_commands}
    assert sorted(compose["services"]) == ["server", "site-a", "site-b", "site-c"]
    for name, service in compose["services"].items():
        words = service["command"].split()
        assert words[0] == "deploy" and words[1] in commands and words[2] == f"/kits/{name}"
        assert service["user"] == "${FEDVLM_USER:-1000:1000}" and service["init"] is True
        assert "ports" not in service and "privileged" not in service
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"]
        assert {"depends_on"} & service.keys() if name != "server" else True
        for volume in service["volumes"]:
            assert volume.startswith("./") and ".." not in volume
    dockerfile = (ROOT / "packaging" / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^FROM \S+@sha256:[0-9a-f]{64}$", dockerfile, re.M) == re.findall(r"^FROM .*$", dockerfile, re.M)


def test_workflows_name_actions_by_hash_and_keep_no_credentials():
    workflows = list((ROOT / ".github" / "workflows").glob("*.y*ml"))
    assert workflows
    for path in workflows:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                if "uses" in step:
                    assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", step["uses"]), step
                if "checkout" in step.get("uses", ""):
                    assert step["with"]["persist-credentials"] is False
