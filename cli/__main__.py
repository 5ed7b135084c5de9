"""``python -m dnictl``."""

from dnictl.main import program

program()
