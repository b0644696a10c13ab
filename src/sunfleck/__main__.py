"""`python -m sunfleck` is the `sunfleck` command."""

from sunfleck.cli import main

if __name__ == "__main__":
    main()
