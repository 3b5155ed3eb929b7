"""`python -m everstep.cli` is `everstep`."""

from everstep.cli.main import main

if __name__ == "__main__":
    main()
