"""`python -m everstep.cli` is `everstep`."""

from everstep.cli.main import main

main()
