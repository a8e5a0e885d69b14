"""Glue to model libraries: the only code that imports transformers."""
