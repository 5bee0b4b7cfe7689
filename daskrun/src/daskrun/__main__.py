"""`python -m daskrun` is the command `daskrun`."""

from daskrun.command import main

main(prog_name="daskrun")
