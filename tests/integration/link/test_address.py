"""Where a module can listen, and the error if it cannot."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import DataError, SpecError, UnavailableError
from dni_runtime.link import address as address_module
from dni_runtime.link import check_address, encrypted, listen_address
from dni_runtime.link.address import addresses
from dni_runtime.spec import LinksSpec


def tcp(**fields: Any) -> LinksSpec:
    return LinksSpec(transport="tcp", **fields)


@pytest.fixture
def taken() -> Any:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_ipc_lies_in_the_socket_folder(tmp_path: Path, transport: Any) -> None:
    links = LinksSpec(transport=transport)
    assert listen_address(links, 3, tmp_path, "tail") == f"ipc://{tmp_path}/tail.sock"
    assert check_address(links, 3, tmp_path, "tail") == f"ipc://{tmp_path}/tail.sock"


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (tcp(), "tcp://127.0.0.1:*"),
        (tcp(port=5000), "tcp://127.0.0.1:5003"),
        (tcp(interface="127.0.0.1", port=5000), "tcp://127.0.0.1:5003"),
        (tcp(interface="127.0.0.2"), "tcp://127.0.0.2:*"),
        (tcp(interface="lo"), "tcp://127.0.0.1:*"),
    ],
)
def test_tcp_addresses(tmp_path: Path, links: LinksSpec, expected: str) -> None:
    assert listen_address(links, 3, tmp_path, "tail") == expected


def test_ipv6_addresses(tmp_path: Path, links: Any) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    wanted = check_address(tcp(interface="::1"), 0, tmp_path, "tail")
    assert wanted == "tcp://[::1]:*"
    output, input, _ = links.pair(wanted)
    assert output.connected
    assert input.connected


@pytest.mark.parametrize("interface", ["::1", None])
def test_names_of_ipv6_addresses(links: Any, interface: str | None) -> None:
    """Of names they are used by who listens at such an address, as in a Kubernetes of IPv6 alone.

    Without brackets an address is to libzmq what a name is: one to look up.
    """
    input = links.input()
    try:
        address = input.bind("tcp://[::1]:*").replace("[", "").replace("]", "")
    except UnavailableError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    output = links.output(links=tcp(interface=interface))
    if interface is not None:
        links.shake(output, input, address)
        assert output.connected
        return
    with pytest.raises((DataError, UnavailableError)):
        output.connect(address, deadline_s=0.3)


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no network interface 'ib7'") as caught:
        listen_address(tcp(interface="ib7"), 0, tmp_path, "tail")
    assert str(caught.value).startswith("links.interface: this machine")
    assert "lo (127.0.0.1)" in str(caught.value.hint)


def test_an_interface_without_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "interfaces", lambda: {"ib0": None})
    with pytest.raises(UnavailableError, match="'ib0' has no address") as caught:
        listen_address(tcp(interface="ib0"), 0, tmp_path, "tail")
    assert "ib0 (no address)" in str(caught.value.hint)


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    # 192.0.2.0/24 is for documentation (RFC 5737)
    with pytest.raises(
        UnavailableError, match=r"does not have the address '192\.0\.2\.1'"
    ) as caught:
        listen_address(tcp(interface="192.0.2.1", security="none"), 0, tmp_path, "tail")
    assert "lo (127.0.0.1)" in str(caught.value.hint)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "224.0.0.1"])
def test_every_interface_at_once_is_refused(tmp_path: Path, interface: str) -> None:
    with pytest.raises(SpecError, match=r"links\.interface: .* is not a single address") as caught:
        listen_address(tcp(interface=interface, security="none"), 0, tmp_path, "tail")
    assert "lo (127.0.0.1)" in str(caught.value.hint)


@pytest.mark.parametrize("security", ["auto", "none"])
def test_tcp_beyond_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: Any
) -> None:
    there = [("eth7", "198.51.100.4"), ("eth7", "fd00::2")]
    ips = [(name, ipaddress.ip_address(ip)) for name, ip in there]
    monkeypatch.setattr(address_module, "addresses", lambda: ips)
    links = tcp(interface="eth7", security=security)
    address = listen_address(links, 0, tmp_path, "tail")
    assert address == "tcp://198.51.100.4:*"
    assert encrypted(links, address) == (security == "auto")


@pytest.mark.parametrize(
    ("address", "security", "expected"),
    [
        ("ipc:///run/tail.sock", "auto", False),
        ("ipc:///run/tail.sock", "curve", False),
        ("tcp://127.0.0.1:5000", "auto", False),
        ("tcp://127.0.0.1:5000", "curve", True),
        ("tcp://[::1]:5000", "auto", False),
        ("tcp://[fd00::2]:5000", "auto", True),
        ("tcp://10.0.0.1:*", "auto", True),
        ("tcp://localhost:5000", "auto", True),  # a name may lead anywhere
        ("tcp://*:5000", "auto", True),
        ("tcp://10.0.0.1:5000", "none", False),
    ],
)
def test_what_is_encrypted(address: str, security: Any, expected: bool) -> None:
    assert encrypted(tcp(security=security), address) == expected


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("127.0.0.0/8", "tcp://127.0.0.1:*"),
        ("127.0.0.1/32", "tcp://127.0.0.1:*"),
        ("198.51.100.0/24", "tcp://198.51.100.4:*"),
        ("0.0.0.0/0", "tcp://198.51.100.4:*"),  # loopback comes last
        ("fd00::/8", "tcp://[fd00::2]:*"),
    ],
)
def test_the_address_in_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str, expected: str
) -> None:
    ips = [("lo", "127.0.0.1"), ("eth0", "198.51.100.4"), ("eth0", "fd00::2")]
    there = [(name, ipaddress.ip_address(ip)) for name, ip in ips]
    monkeypatch.setattr(address_module, "addresses", lambda: there)
    assert listen_address(tcp(interface=interface), 0, tmp_path, "tail") == expected


def test_this_machines_addresses() -> None:
    there = addresses()
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in there
    for name, ip in there:
        assert name in {name for _, name in socket.if_nameindex()}
        check_address(tcp(interface=str(ip)), 0, Path(), "tail")


def test_a_network_without_this_machine(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no address in the network '192\.0\.2\.128/30'"):
        listen_address(tcp(interface="192.0.2.128/30"), 0, tmp_path, "tail")


@pytest.mark.parametrize("interface", ["10.0.0.5/24", "10.0.0.0/64", "eth0/24"])
def test_what_is_no_network(tmp_path: Path, interface: str) -> None:
    with pytest.raises(SpecError, match=r"links\.interface: .* is not a network"):
        listen_address(tcp(interface=interface), 0, tmp_path, "tail")


def test_a_port_that_is_in_use(tmp_path: Path, links: Any, taken: int) -> None:
    with pytest.raises(UnavailableError, match=f"^links.port: .*:{taken}: it is in use"):
        check_address(tcp(port=taken), 0, tmp_path, "tail")
    with pytest.raises(UnavailableError, match=f":{taken}: it is in use"):
        links.input().bind(f"tcp://127.0.0.1:{taken}")


def test_a_port_that_is_free(tmp_path: Path, taken: int) -> None:
    for _ in range(2):  # checking does not take it
        check_address(tcp(port=taken - 1), 0, tmp_path, "tail")


def test_ports_end_somewhere(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"links\.port: .*port 65000 \+ 600, beyond 65535"):
        listen_address(tcp(port=65000), 600, tmp_path, "tail")


def test_an_address_that_this_machine_does_not_have(links: Any) -> None:
    with pytest.raises(UnavailableError, match=r"cannot listen on tcp://192\.0\.2\.1:5000"):
        links.input(links=tcp(security="none")).bind("tcp://192.0.2.1:5000")


@pytest.mark.parametrize("address", ["udp://127.0.0.1:5000", "nonsense", "tcp://127.0.0.1:x"])
def test_what_is_no_address(links: Any, address: str) -> None:
    with pytest.raises(UnavailableError, match="cannot listen on"):
        links.input().bind(address)
    with pytest.raises(DataError, match="cannot connect to"):
        links.output().connect(address, deadline_s=1)


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="longer than 107 bytes") as caught:
        check_address(LinksSpec(), 0, tmp_path / ("x" * 100), "tail")
    assert "XDG_RUNTIME_DIR" in str(caught.value.hint)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"socket folder .* is missing"):
        check_address(LinksSpec(), 0, tmp_path / "gone", "tail")


def test_a_living_process_keeps_its_socket(tmp_path: Path, links: Any) -> None:
    address = f"ipc://{tmp_path}/tail.sock"
    output, first, _ = links.pair(address)
    with pytest.raises(UnavailableError, match="another process listens on"):
        check_address(LinksSpec(), 0, tmp_path, "tail")
    with pytest.raises(UnavailableError, match="another process listens on"):
        links.input().bind(address)
    output.send_batch(*links.batch(1))
    links.until(lambda: first.receive() is not None, "a batch, as before")


def test_a_dead_process_does_not(tmp_path: Path, links: Any) -> None:
    path = tmp_path / "tail.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    check_address(LinksSpec(), 0, tmp_path, "tail")
    links.pair(f"ipc://{path}")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_ours_stays(tmp_path: Path, links: Any, kind: str) -> None:
    path = tmp_path / "tail.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(UnavailableError, match="is in the way"):
        links.input().bind(f"ipc://{path}")
    assert path.lstat()


def test_closing_removes_the_socket_file(tmp_path: Path, links: Any) -> None:
    input = links.input()
    input.bind(f"ipc://{tmp_path}/tail.sock")
    input.close()
    assert not (tmp_path / "tail.sock").exists()


def test_closing_leaves_a_successors_socket_file(tmp_path: Path, links: Any) -> None:
    path = tmp_path / "tail.sock"
    old, new = links.input(), links.input()
    old.bind(f"ipc://{path}")
    path.unlink()
    new.bind(f"ipc://{path}")
    old.close()
    assert path.exists()
