"""State-space systems by seed, on which no choice of the library was made by hand.

`studies.systems.grammar` draws a system from a seed, `studies.systems.system` simulates it,
`studies.systems.floors` computes its least error, and ``python -m studies systems`` compares
models with it. Choices are made on seeds below 100; results are reported for seeds 100 to 199.
"""
