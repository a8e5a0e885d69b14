"""``python -m tierkv``: the same command line as the ``tierkv`` script."""

from tierkv.cli.app import main

if __name__ == "__main__":
    main()
