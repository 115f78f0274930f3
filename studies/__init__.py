"""The workshop: reproductions of the papers, benchmarks and stress tests.

Not part of the installed package.
"""
