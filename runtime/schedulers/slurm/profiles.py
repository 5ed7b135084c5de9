"""Finding and reading site profiles."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from dni_runtime.errors import SpecError, UsageError, unreadable
from dni_runtime.files import xdg_folder
from dni_runtime.spec.load import explain_details, explained, parse_yaml, suggestion
from dni_runtime.spec.profile import ProfileSpec


def profile_folder() -> Path:
    """Return the folder of the user's profiles."""
    return xdg_folder("XDG_CONFIG_HOME", ".config") / "profiles"


def profile_files() -> dict[str, Path]:
    """Return the profiles by name: the packaged example and the user's own, which override it."""
    profiles: dict[str, Path] = {}
    for folder in (Path(str(files("dni_runtime.definitions"))) / "profiles", profile_folder()):
        if folder.is_dir():
            profiles |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return profiles


def load_profile(name: str | None) -> ProfileSpec:
    """Read a profile; without a name return an empty one."""
    if name is None:
        return ProfileSpec()
    known = profile_files()
    if name not in known:
        raise UsageError(
            f"there is no site profile {name!r} in {str(profile_folder())!r}",
            hint=f"{suggestion(name, list(known))}; copy 'dnictl profile show example' for a start",
        )
    path = known[name]
    try:
        return parse_profile(path.read_text(encoding="utf-8"), file=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(unreadable(path, error)) from None


def override(profile: ProfileSpec, settings: Mapping[str, str | None]) -> ProfileSpec:
    """Return a profile with the settings that are given on the command line."""
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return ProfileSpec.model_validate(profile.model_dump() | given)
    except ValidationError as error:
        location, message, hint = explain_details(error, ProfileSpec)
        raise UsageError(f"--{location[0]}: {message}", hint=hint) from None


def parse_profile(text: str, *, file: str) -> ProfileSpec:
    document, lines = parse_yaml(text, file)
    try:
        return ProfileSpec.model_validate({} if document is None else document)
    except ValidationError as error:
        raise explained(error, ProfileSpec, lines, file) from None
