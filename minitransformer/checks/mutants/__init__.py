"""One file a mechanism, mirroring the package: named, explained wrong implementations."""
