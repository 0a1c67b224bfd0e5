"""The random Transformer: what chance keeps, how the rest makes up for it, how much it drops."""
