"""Bytes of blocks, one medium a file: ``slab`` (device and pinned memory), ``disk`` (LMDB), ``spill`` (slices on it)."""
