"""Where a module listens: interface, address and port of its input end."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from dni_runtime.errors import SpecError, UnavailableError
from dni_runtime.link.sockets import cannot_listen, check_path
from dni_runtime.spec import LinksSpec

_SIOCGIFCONF = 0x8912  # netdevice(7): all IPv4 addresses, as an array of struct ifreq
_IFREQ_BYTES = 40
_ANY_PORT = "*"

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def listen_address(links: LinksSpec, index: int, socket_folder: Path, module: str) -> str:
    """The address that a module's input end binds: ``ipc://PATH`` or ``tcp://IP:PORT``.

    The port is ``links.port + index`` (of the link), or ``*`` if the system chooses one; ``module``
    may also be the name of the link.
    """
    if links.transport != "tcp":
        return f"ipc://{socket_folder / module}.sock"
    ip = _resolve(links.interface)
    port = _ANY_PORT
    if links.port is not None:
        number = links.port + index
        if number > 65535:
            raise SpecError(
                f"link {index} (to {module!r}) would listen on port {links.port} + {index}, beyond "
                "65535",
                location=("links", "port"),
                hint="choose a lower first port, or leave it out",
            )
        port = str(number)
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return f"tcp://{host}:{port}"


def encrypted(links: LinksSpec, address: str) -> bool:
    """Whether a link whose input end listens at this address is encrypted.

    Both ends ask this, and know the same address. ``ipc://`` never is: its sockets lie in a folder
    that only their owner can enter.
    """
    if links.security == "none" or not address.startswith("tcp:"):
        return False
    if links.security == "curve":
        return True
    return not is_loopback(address)  # a name may lead anywhere


def is_loopback(address: str) -> bool:
    """Whether a ``tcp://`` address is one of loopback, and no name."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(links: LinksSpec, index: int, socket_folder: Path, module: str) -> str:
    """The address as :func:`listen_address` gives it, with proof that it can be had now.

    Raises ``UnavailableError`` if the interface, address, port or path is missing or taken,
    ``SpecError`` if it is no address to listen on or there is no such port.
    """
    address = listen_address(links, index, socket_folder, module)
    if address.startswith("ipc://"):
        check_path(Path(address.removeprefix("ipc://")))
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    _try_bind(ipaddress.ip_address(host.strip("[]")), 0 if port == _ANY_PORT else int(port))
    return address


def interface_name(interface: str) -> str:
    """Return the name of the interface that ``links.interface`` means."""
    ip = _resolve(interface)
    return next(name for name, address in addresses() if address == ip)


def interfaces() -> dict[str, _Ip | None]:
    """This machine's network interfaces, each with the first of its :func:`addresses`."""
    names = dict.fromkeys(name for _, name in socket.if_nameindex())
    return {**names, **dict(reversed(addresses()))}


def addresses() -> list[tuple[str, _Ip]]:
    """This machine's addresses that others can reach by themselves, each with its interface.

    IPv4 addresses come first.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array.array("B", bytes(_IFREQ_BYTES * 256))
        place, _ = room.buffer_info()
        size = struct.unpack(
            "iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), place))
        )[0]
    pairs: list[tuple[str, _Ip]] = []
    for start in range(0, size, _IFREQ_BYTES):
        entry = room[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:16].partition(b"\0")[0].decode()
        pairs.append((name, ipaddress.IPv4Address(entry[20:24])))
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, *_, name = line.split()
        ip = ipaddress.IPv6Address(bytes.fromhex(number))
        if not ip.is_link_local:  # which would need its interface's number, too
            pairs.append((name, ip))
    return pairs


def _resolve(interface: str | None) -> _Ip:
    if interface is None:
        return ipaddress.IPv4Address("127.0.0.1")
    if "/" in interface:
        return _in_network(interface)
    try:
        ip: _Ip = ipaddress.ip_address(interface)
    except ValueError:
        return _of_interface(interface)
    if ip.is_unspecified or ip.is_multicast:
        raise SpecError(
            f"{interface!r} is not a single address to listen on",
            location=("links", "interface"),
            hint=f"name one network interface or address. {_there()}",
        )
    try:
        _try_bind(ip, 0)
    except UnavailableError as error:
        raise _missing(f"this machine does not have the address {interface!r}") from error
    return ip


def _in_network(text: str) -> _Ip:
    """This machine's address in a network such as ``10.0.0.0/24``."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise SpecError(
            f"{text!r} is not a network: {error}",
            location=("links", "interface"),
            hint="write it as 10.0.0.0/24, or name a network interface",
        ) from None
    inside = [ip for _, ip in addresses() if ip in network]
    if not inside:
        raise _missing(f"this machine has no address in the network {text!r}")
    # a wide network may hold loopback too
    return min(inside, key=lambda ip: ip.is_loopback)


def _of_interface(name: str) -> _Ip:
    known = interfaces()
    if name not in known:
        raise _missing(f"this machine has no network interface {name!r}")
    ip = known[name]
    if ip is None:
        raise _missing(f"the network interface {name!r} has no address")
    return ip


def _missing(what: str) -> UnavailableError:
    return UnavailableError(what, location=("links", "interface"), hint=_there())


def _there() -> str:
    shown = (f"{name} ({address or 'no address'})" for name, address in interfaces().items())
    return f"there is: {', '.join(shown)}"


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
