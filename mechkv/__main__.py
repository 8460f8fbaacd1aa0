"""`python -m mechkv` is the command line."""

from mechkv.cli import main

if __name__ == "__main__":
    main()
