"""Tests of the statistics loggers."""
