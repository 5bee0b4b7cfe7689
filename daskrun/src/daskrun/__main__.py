"""`python -m daskrun` is the command `daskrun`."""

from daskrun.command import main

if __name__ == "__main__":
    main(prog_name="daskrun")
