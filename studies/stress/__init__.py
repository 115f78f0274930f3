"""Stress tests: kills, damaged files, bad input and endurance runs."""
