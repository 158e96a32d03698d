"""`python -m gradvac.cli` is `gradvac`."""

from gradvac.cli import main

main()
