"""``python -m dnictl``."""

from dnictl.main import main

main()
