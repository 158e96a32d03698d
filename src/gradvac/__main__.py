"""`python -m gradvac` is `gradvac`."""

from gradvac.cli import main

main()
