"""`python -m rooflight`: the command line."""

from rooflight.cli.main import main

if __name__ == "__main__":
    main()
