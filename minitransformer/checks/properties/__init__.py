"""One file a mechanism, mirroring the package: the properties, each a function of a target."""
