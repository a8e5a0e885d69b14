"""Measurements: one question a module, one JSON record a run. ``README.md`` says how a number is taken."""
