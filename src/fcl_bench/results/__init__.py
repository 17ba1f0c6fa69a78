"""Turns run folders into tables, figures and a page."""
