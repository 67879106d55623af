"""Modules that replace other packages: they have the names and arguments of those packages, and load with tensorfs."""
