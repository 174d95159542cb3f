"""Closed forms and searches: numbers in, numbers out; no file, no clock, no chance."""
