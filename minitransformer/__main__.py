"""`python -m minitransformer`: the same as the command `minitransformer`."""

from minitransformer.cli import main

if __name__ == "__main__":
    main()
