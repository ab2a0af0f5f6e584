"""Tests of fedvlm."""
