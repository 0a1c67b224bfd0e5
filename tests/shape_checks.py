"""The type checker that the shape checks run with: beartype, with `float` accepting an int as
everywhere in Python."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
