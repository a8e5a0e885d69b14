"""Contract suites and fakes, for this project's tests and for whoever writes another store."""
