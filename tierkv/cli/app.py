"""The entry point of the ``tierkv`` command. It imports the command line only once Ctrl-C is taken care of."""

from tierkv.cli.process import prepare_process


def main() -> None:
    """Run the command line of this process."""
    prepare_process()
    from tierkv.cli.commands import app

    app(prog_name="tierkv")
