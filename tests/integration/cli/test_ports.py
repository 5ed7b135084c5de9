"""Addresses of this host: a port that another program has, one that others can reach."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.unit.cli.conftest import Dnictl, WriteChain


def test_a_port_that_is_taken(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = write_chain(("epochs: 2", f"epochs: 2\nlinks: {{transport: tcp, port: {port - 1}}}"))
        result = dnictl("up", path, "--backend", "process")
    assert result.code == 69
    assert "chain.yaml:5: links.port" in result.err
    assert str(port) in result.err
    assert not (folder / "runs").exists()


def test_links_without_encryption_are_warned_about(dnictl: Dnictl, write_chain: WriteChain) -> None:
    links = "links: {transport: tcp, interface: 127.0.0.1, security: none}"
    path = write_chain(("epochs: 2", f"epochs: 2\n{links}"))
    for command in (["validate", path], ["up", path, "--backend", "process", "--dry-run"]):
        result = dnictl(*command)
        assert result.code == 0
        assert "warning: 'links.security: none': anyone who can reach '127.0.0.1'" in result.err
    path = write_chain(("epochs: 2", f"epochs: 2\n{links.replace('none', 'curve')}"))
    assert "security" not in dnictl("validate", path).err
