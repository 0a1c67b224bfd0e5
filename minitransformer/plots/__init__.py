"""One figure a function, each with one message; every function returns a matplotlib Figure.

Colour maps are perceptually uniform and read in greyscale; backgrounds are opaque, so that a figure
reads in a dark notebook as well. Nothing here touches pyplot's global state.
"""
