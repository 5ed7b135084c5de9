"""Where a module listens: interface, address and port of its input end."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from dni_runtime.errors import SpecError, UnavailableError
from dni_runtime.link import socketfile
from dni_runtime.link.sockets import cannot_listen
from dni_runtime.spec import LinksSpec

_SIOCGIFADDR = 0x8915  # netdevice(7): the interface's first IPv4 address
_ANY_PORT = "*"

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def listen_address(links: LinksSpec, index: int, socket_folder: Path, module: str) -> str:
    """The address that a module's input end binds.

    Args:
        links: The chain's link settings.
        index: The module's position in the chain; its port is ``links.port + index``.
        socket_folder: Where ipc sockets lie (``rundir.socket_folder``).
        module: The module's name.

    Returns:
        ``ipc://PATH`` or ``tcp://IP:PORT``; the port is ``*`` where the system chooses one.

    Raises:
        UnavailableError: The interface or address is not there.
        SpecError: Plain TCP beyond loopback without ``security: none``, or no such port.
    """
    if links.transport != "tcp":
        return f"ipc://{socket_folder / module}.sock"
    ip = _resolve(links.interface)
    if not ip.is_loopback and links.security == "auto":
        raise SpecError(
            f"{links.interface!r} ({ip}) is reachable from other hosts, and encrypted links are "
            "not there yet",
            location=("links", "security"),
            hint="'security: none' accepts that others on that network can read and disturb the "
            "run; leaving out 'interface' stays on loopback",
        )
    port = _ANY_PORT
    if links.port is not None:
        number = links.port + index
        if number > 65535:
            raise SpecError(
                f"module {index} ({module!r}) would listen on port {links.port} + {index}, beyond "
                "65535",
                location=("links", "port"),
                hint="choose a lower first port, or leave it out",
            )
        port = str(number)
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return f"tcp://{host}:{port}"


def check_address(links: LinksSpec, index: int, socket_folder: Path, module: str) -> str:
    """The address as :func:`listen_address` gives it, with proof that it can be had now.

    Raises:
        UnavailableError: The port or path is taken; or as :func:`listen_address`.
        SpecError: As :func:`listen_address`.
    """
    address = listen_address(links, index, socket_folder, module)
    if address.startswith("ipc://"):
        socketfile.check(Path(address.removeprefix("ipc://")))
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    _try_bind(ipaddress.ip_address(host.strip("[]")), 0 if port == _ANY_PORT else int(port))
    return address


def interfaces() -> dict[str, str | None]:
    """This machine's network interfaces with their first IPv4 address."""
    return {name: _ipv4(name) for _, name in socket.if_nameindex()}


def _resolve(interface: str | None) -> _Ip:
    if interface is None:
        return ipaddress.IPv4Address("127.0.0.1")
    try:
        ip: _Ip = ipaddress.ip_address(interface)
    except ValueError:
        return _of_interface(interface)
    if ip.is_unspecified or ip.is_multicast:
        raise SpecError(
            f"{interface!r} is no single address to listen on",
            location=("links", "interface"),
            hint=f"name one interface or address. {_there()}",
        )
    try:
        _try_bind(ip, 0)
    except UnavailableError as error:
        raise UnavailableError(
            f"links.interface: this machine does not have the address {interface!r}", hint=_there()
        ) from error
    return ip


def _of_interface(name: str) -> _Ip:
    known = interfaces()
    if name not in known:
        raise UnavailableError(
            f"links.interface: this machine has no network interface {name!r}", hint=_there()
        )
    address = known[name]
    if address is None:
        raise UnavailableError(
            f"links.interface: the network interface {name!r} has no IPv4 address", hint=_there()
        )
    return ipaddress.ip_address(address)


def _there() -> str:
    shown = (f"{name} ({address or 'no IPv4 address'})" for name, address in interfaces().items())
    return f"there is: {', '.join(shown)}"


def _ipv4(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _try_bind(ip: _Ip, port: int) -> None:
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as libzmq does, so that a port in TIME_WAIT counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((str(ip), port))
            if port:
                probe.listen(1)  # two sockets with SO_REUSEADDR may both bind, but not listen
    except OSError as error:
        raise cannot_listen(f"tcp://{ip}:{port}", error.errno) from None
