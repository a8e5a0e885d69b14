"""The ``tierkv`` command line: one file for each command, over what all of them share (``console``, ``progress``)."""
