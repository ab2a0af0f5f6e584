"""`python -m fedvlm` is the command `fedvlm`."""

from fedvlm.cli import main

main()
