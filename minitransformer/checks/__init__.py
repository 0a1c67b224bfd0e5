"""What "correct" means: properties of any implementation, and named wrong implementations that they
catch.

A *target* is any object with a mechanism module's public names as attributes: the library's module,
a learner's file, somebody else's code. A *property* is a statement about any target. A *mutant* is
a target with one name replaced by a mistake that people make. The reference passes every property,
every mutant is killed by at least one property, and every property kills at least one mutant: a
property that cannot fail is a defect.
"""
