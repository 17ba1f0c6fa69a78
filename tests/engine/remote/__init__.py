"""Tests of engine.remote."""
