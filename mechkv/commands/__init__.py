"""One file a command; see `mechkv.cli`."""
