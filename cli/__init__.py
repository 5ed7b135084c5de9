"""``dnictl``: the command line of dni-runtime. The only package that prints and exits."""
